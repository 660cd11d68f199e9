"""What a payload costs and saves: two ratios, and what is shared beside them.

The *codec ratio* is of coded tokens only (the figure of the paper's headline); the *whole ratio* is of the
cache, sinks and window included: at 1,024 tokens with a window of 128 no codec reaches 8. Denominators are
16-bit KV. The artefact is shared by all payloads of a model and never in a ratio, so it stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.kv.container import read_payload
from workbench.kv.kvtc import exempt
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.header import KIND, VERSION, Header


@dataclass(frozen=True)
class Account:
    """Bytes of one payload. ``exempt``: rows in it that stay in 16 bits; ``plain``: all rows in 16 bits.

    ``coded_plain`` is the coded tokens' share of ``plain``; ``shared`` the artefact, once per model.
    """

    tokens: int
    coded: int
    payload: int
    exempt: int
    plain: int
    coded_plain: int
    shared: int

    @property
    def codec_ratio(self) -> float | None:
        """16-bit bytes of the coded tokens over theirs here, header included; None when none is coded."""
        return self.coded_plain / (self.payload - self.exempt) if self.coded else None

    @property
    def whole_ratio(self) -> float:
        """16-bit bytes of the whole cache over the payload's."""
        return self.plain / self.payload

    @property
    def break_even(self) -> float | None:
        """Tokens after which the bytes saved exceed the artefact's; None if nothing is saved."""
        saved = self.coded_plain - (self.payload - self.exempt)
        return self.shared * self.coded / saved if saved > 0 else None


def account(codec: Kvtc, data: bytes) -> Account:
    """The account of a payload that ``codec`` could decode; raises :class:`PayloadError` for any other."""
    header = Header.read(read_payload(data, KIND, VERSION).header)
    header.require(codec.artefact, codec.joint)
    joint = codec.joint
    full, others = len(joint.layers), joint.num_layers - len(joint.layers)

    def size(layers: int, tokens: int) -> int:
        return exempt.nbytes(layers, tokens, joint.heads, joint.dim)

    return Account(
        tokens=header.tokens,
        coded=header.coded,
        payload=len(data),
        exempt=size(full, header.tokens - header.coded) + size(others, header.sliding),
        plain=size(full, header.tokens) + size(others, header.sliding),
        coded_plain=size(full, header.coded),
        shared=codec.shared_bytes,
    )
