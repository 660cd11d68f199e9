// A model's messages wait until its script is loaded. anywidget waits two seconds, on a busy machine less than
// a browser needs, and then turns every message away for good: the region is drawn and never changes again.
// Such a model takes its messages itself from here on, and asks for what it missed.
async function hear(model) {
  const manager = model.widget_manager;
  const own = manager && manager.get_model ? await manager.get_model(model.get("ident")) : null;
  if (!own || !own.comm) return;  // a saved page: nobody sends
  try {
    await own._handle_comm_msg({ content: { data: { method: "" } }, buffers: [] });
  } catch {
    const plain = Object.getPrototypeOf(Object.getPrototypeOf(own));  // of every Jupyter widget: it waits for nothing
    own.comm.on_msg((message) => plain._handle_comm_msg.call(own, message));
    own.comm.send({ method: "request_state" }, own.callbacks());
  }
}

function initialize({ model }) {
  // Not awaited: a model counts as loaded, and hears, once this has returned.
  hear(model).catch((error) => console.warn("A region of the panel may not follow the kernel.", error));
}
