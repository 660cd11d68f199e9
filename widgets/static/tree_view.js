// Draft trees on their own: a slider over rounds, the tree, its mask, and all of it as text.
function render({ model, el: root }) {
  const p = model.get("picture"), last = p.rounds.length - 1, region = treeRegion();
  const picture = pictureRegion(p, p.knob, (at) => { model.set("at", at); model.save_changes(); }, region.node, region.legend);
  const draw = () => {
    const at = Math.min(Math.max(model.get("at"), 0), last), round = p.rounds[at];
    picture.step.show(at, last, round.words);
    region.draw(round);
    picture.tell(region.lines(round));
  };
  picture.asText.addEventListener("toggle", draw);
  root.append(picture.all);
  model.on("change:at", draw);
  draw();
  return () => model.off("change:at", draw);
}

export default { render };
