"""The storage codec: cached rows to self-contained bytes, and back, a layer at a time.

arXiv 2511.01815, section 3. The first ``sinks`` tokens and the last ``window`` stay in 16 bits; tokens are
coded 16 at a time as they leave the window, always in products of one shape, so that coding while a sequence
grows gives the bytes of coding it whole. Decoding needs those bytes and the artefact, nothing else.
"""

from __future__ import annotations

from workbench.kv.cached import CachedRows, Reconstructed
from workbench.kv.container import read_payload
from workbench.kv.kvtc import exempt
from workbench.kv.kvtc.artefact import Artefact
from workbench.kv.kvtc.codes import Coder
from workbench.kv.kvtc.encoder import Encoder
from workbench.kv.kvtc.entropy import STAGES, Entropy
from workbench.kv.kvtc.header import CHUNK, KIND, VERSION, Header
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.stored import Stored
from workbench.spec.errors import OptionError, PayloadError


class Kvtc:
    """One model's codec at one pair of ratios.

    Raises :class:`OptionError` for options out of range, :class:`PayloadError` when ``artefact`` was made for
    other weights than ``model`` (:attr:`WeightSet.fingerprint`) or another rotary embedding.
    """

    def __init__(
        self,
        artefact: Artefact,
        joint: JointRows,
        model: str,
        *,
        sinks: int = 4,
        window: int = 128,
        entropy: Entropy = "deflate",
    ) -> None:
        if entropy not in STAGES or sinks < 0 or window < 0:
            raise OptionError(
                f"kvtc cannot use sinks = {sinks}, window = {window}, entropy = {entropy!r}.",
                hint=f"Sizes are at least 0, entropy is one of {', '.join(STAGES)}.",
            )
        for what, own, given in (
            ("weights", artefact.model, model),
            ("rotary embedding and layers", artefact.phases, joint.key),
        ):
            if own != given:
                raise PayloadError(
                    f"This kvtc calibration is of other {what}: {own[:12]}, not {given[:12]}.",
                    hint="Calibrate on the model that is loaded.",
                )
        self.artefact, self.joint = artefact, joint
        self.sinks, self.window, self.entropy = sinks, window, entropy
        self.coders = Coder(artefact.k.plan), Coder(artefact.v.plan)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the artefact that this entropy stage needs, once per model."""
        return self.artefact.nbytes + (self.artefact.cross.nbytes if self.entropy == "range" else 0)

    @property
    def key(self) -> str:
        """Format, version, options and calibration: part of the key of whatever it restores (law 4)."""
        return f"{KIND}/{VERSION}/{self.sinks}/{self.window}/{self.artefact.key}"

    def encoder(self) -> Encoder:
        """An encoder for one sequence that is given rows as they are committed."""
        return Encoder(
            self.artefact, self.joint, self.coders, sinks=self.sinks, window=self.window, entropy=self.entropy
        )

    def encode(self, rows: CachedRows) -> bytes:
        """The bytes of rows at consecutive positions.

        Raises :class:`WrongShape` for rows of another model and :class:`UnsupportedInput` for positions with
        gaps, infinities or NaN.
        """
        encoder = self.encoder()
        encoder.push(rows)
        return encoder.payload()

    def open(self, data: bytes | memoryview) -> Stored:
        """Check a payload and undo its entropy coding; layers are then decoded one by one.

        Raises :class:`PayloadError` when it is damaged, or belongs to another model or calibration.
        """
        payload = read_payload(data, KIND, VERSION)
        header = Header.read(payload.header)
        header.require(self.artefact, self.joint)
        return Stored(payload, header, self.artefact, self.joint, self.coders)

    def decode(self, data: bytes) -> CachedRows:
        """All layers of :meth:`open`, in the dtype that was encoded."""
        return self.open(data).rows()

    def round_trip(self, rows: CachedRows) -> Reconstructed:
        """Encode and decode, with the bytes it took: what measurements call."""
        data = self.encode(rows)
        stored = self.open(data)
        return Reconstructed(stored.rows(), len(data), stored.header.tokens - stored.header.coded)

    def coded(self, tokens: int) -> int:
        """How many of the first ``tokens`` positions of a sequence are coded, not kept in 16 bits."""
        return max(tokens - self.sinks - self.window, 0) // CHUNK * CHUNK

    def analytic_bytes(self, tokens: int) -> int:
        """Bytes before entropy coding of a sequence of ``tokens``, by arithmetic; without the header."""
        joint, coded = self.joint, self.coded(tokens)
        sliding = min(tokens, joint.window or 0)
        return (
            coded * self.artefact.bits // 8
            + exempt.nbytes(len(joint.layers), tokens - coded, joint.heads, joint.dim)
            + exempt.nbytes(joint.num_layers - len(joint.layers), sliding, joint.heads, joint.dim)
        )
