"""What a request must satisfy before it is queued; everything later in the engine relies on it."""

from __future__ import annotations

from workbench.engine.kv import KVCache
from workbench.engine.sequence import Request
from workbench.spec.errors import CapacityError, EmptyPrompt, PromptTooLong, RequestError, UnknownToken


def token_budget(
    request: Request,
    kv: KVCache,
    *,
    context: int,
    vocab_size: int,
    max_sequences: int,
    block: int | None = None,
) -> int:
    """Output tokens a request may be given, or the error that says why it can never be served.

    ``block``: tokens computed at a time at most; behind a window, a prompt then never needs all its pages.
    Raises :class:`EmptyPrompt`, :class:`UnknownToken` (ids the model lacks), :class:`PromptTooLong` (no room
    in the context), :class:`CapacityError` (more pages or samples than the engine has), :class:`RequestError`
    (a context that is no part of the prompt).
    """
    prompt, params = request.prompt, request.params
    if not prompt:
        raise EmptyPrompt("The prompt has no tokens.", hint="Give at least one token or some text.")
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise UnknownToken(
            f"Token id {bad} of the prompt is not in the vocabulary of {vocab_size:,} tokens.",
            hint=f"Ids go from 0 to {vocab_size - 1}: encode the text with this model's tokenizer.",
        )
    if request.context is not None and not 0 < request.context <= len(prompt):
        raise RequestError(
            f"The context is said to be {request.context} tokens of a prompt of {len(prompt)}.",
            hint="Give how many tokens of the prompt come before the question, at least one.",
        )
    room = context - len(prompt)
    if room < 0 or (room == 0 and params.max_tokens > 0):
        raise PromptTooLong(
            f"The prompt has {len(prompt)} tokens; the context holds {context} with the answer.",
            hint=f"Shorten the prompt to {context - 1} tokens or raise the context limit (max_context)."
            if context > 1
            else "Raise the context limit (max_context): it holds the prompt and the answer.",
        )
    budget = min(params.max_tokens, room)
    slots = len(prompt) + max(budget - 1, 0)  # the last token's KV is never written
    if not kv.fits(slots, block):
        each = f" in each of {len(kv.stores)} KV groups" if len(kv.stores) > 1 else ""
        raise CapacityError(
            f"It needs {max(slots, kv.reserve)} KV slots ({kv.pages_for(slots)} pages of {kv.page_size}"
            f"{each}); the whole pool has {kv.pages}{' for each' if each else ' pages'}.",
            hint="Lower max_tokens, shorten the prompt, or enlarge the KV pool (kv_pool_tokens)."
            if not kv.reserve
            else "A contiguous cache reserves the whole context: switch on paged KV, lower the context limit "
            "or enlarge the KV pool (kv_pool_tokens).",
        )
    if params.n > max_sequences:
        raise CapacityError(
            f"It asks for {params.n} samples; the engine runs {max_sequences} at a time.",
            hint="Lower n, or raise max_sequences.",
        )
    return budget
