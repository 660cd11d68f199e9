"""``workbench save-cache``: the KV of a conversation as a file that ``run --resume`` goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli import options as o
from workbench.cli.generate import prepared, read_prompt
from workbench.cli.output import note, out, print_json
from workbench.cli.tasks import working

if TYPE_CHECKING:
    from workbench.core.saved_cache import Saved


def save_cache(
    file: Annotated[Path, typer.Argument(help="The file to write; it appears whole or not at all.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The conversation.")] = None,
    prompt_file: o.PromptFile = None,
    chat: o.Chat = None,
    codec: Annotated[
        str,
        typer.Option(
            metavar="ID[:k=v,…]",
            help="raw: every bit, whatever the KV format. kvtc, cachegen: smaller, with losses.",
        ),
    ] = "raw",
    max_tokens: Annotated[
        int, typer.Option(help="Answer with so many tokens first; they are saved too.")
    ] = 0,
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    model: o.Model = o.DEFAULT_MODEL,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    kv_pool_tokens: o.PoolTokens = o.DEFAULT_POOL,
    max_context: o.MaxContext = 0,
    json: o.Json = False,
) -> None:
    """Compute a conversation and write its KV, to go on from it in another process: run --resume FILE."""
    text = read_prompt(prompt, prompt_file)
    wanted = o.recipe_of(use, recipe)
    o.set_threads(threads)
    from workbench.core.at_rest import storage_use
    from workbench.core.saved_session import token_ids
    from workbench.engine.params import SamplingParams

    chosen = storage_use(codec)
    limits = o.limits_of(kv_pool_tokens, max_context)
    where = o.place_of(dtype, numerics, device, limits=limits, threads=threads)
    with working("saving a conversation", model, wanted, **where) as (session, wait):
        params = SamplingParams(max_tokens=max_tokens)
        asked, params, notice = prepared(session, text, chat, params)
        if notice:
            note(f"note: {notice}")
        ids = token_ids(session, asked)
        if max_tokens:
            ids += wait(session.submit(asked, params)).token_ids
        saved: Saved = wait(session.save_cache(file, ids, chosen))
    if json:
        print_json({"saved": saved.to_dict()})
        return
    kept = f"{saved.cached:,} of {saved.tokens:,} tokens, the others are computed again"
    out().print(f"{saved.path}: {saved.file_bytes:,} bytes, {saved.codec}, {kept}", markup=False)
    if saved.lossy:
        ratio = saved.kv_bytes / saved.file_bytes
        out().print(
            f"· {ratio:.1f} times smaller than in the cache; it serves only who resumes it", markup=False
        )
    if saved.drafter:
        out().print(f"· the drafter: {saved.drafter}", markup=False)
