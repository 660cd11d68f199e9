"""Compiles builds ahead of time, one request a line; runs in a process of its own.

The process must not be interpreting (``TRITON_INTERPRET`` unset) and may have another triton first on its
path. No GPU and no driver: the target is named, the code is never loaded. A compiler that aborts takes only
this process with it. Speaks JSON lines on stdin and the original stdout; what triton prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.kernels import sass
from workbench.kernels.spec import Build, Kernel


def main() -> None:
    """Answer requests until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = serve(request)
        except Exception as error:  # the compiler's own errors have no common base
            answer = {"error": f"{type(error).__name__}: {error}"[:4000]}
        print(json.dumps(answer), file=answers, flush=True)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Facts of one build, from the cache or compiled.

    The request has module, kernel, build, arch, cache, and a ``spare`` folder for what the cache cannot take.
    """
    import triton

    kernel = _kernel(request["module"], request["kernel"])
    build = next(b for b in kernel.builds if b.name == request["build"])
    source = _source(kernel, build)
    key = _key(source, build, request["arch"], triton.__version__)
    folder = Path(request["cache"])
    facts, text = folder / f"{key}.json", folder / f"{key}.sass"
    known = _known(facts) if text.is_file() else None
    if known is not None:
        return {**known, "sass": str(text), "cached": True}
    began = time.perf_counter()
    answer, disassembly = _compile(source, build, request["arch"])
    answer |= {"triton": triton.__version__, "seconds": time.perf_counter() - began, "sass": str(text)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(text, disassembly)
        _write(facts, json.dumps(answer))  # last: its presence says that both are complete
    except OSError:  # a cache that is read-only or full costs time; the code is no worse for it
        text = Path(request["spare"]) / text.name
        _write(text, disassembly)
    return {**answer, "sass": str(text), "cached": False}


def _known(path: Path) -> dict[str, Any] | None:
    """The answer of an earlier run, or None when there is none that can be read."""
    try:
        found = json.loads(path.read_text())
        return found if {"facts", "triton", "seconds"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _kernel(module: str, name: str) -> Kernel:
    """The kernel of that name in a module, given by its dotted name or by the path of its file."""
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise ImportError(module)
        loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    kernels: tuple[Kernel, ...] = getattr(loaded, "KERNELS", None) or (loaded.KERNEL,)
    return next(k for k in kernels if k.name == name)


def _source(kernel: Kernel, build: Build) -> Any:
    """Triton's description of what to compile; every argument is typed or constant."""
    function = kernel.function
    unknown = {*build.signature, *build.constants, *build.aligned} - set(function.arg_names)
    missing = set(function.arg_names) - {*build.signature, *build.constants}
    if unknown or missing:
        raise ValueError(f"arguments unknown: {sorted(unknown)}, without a type: {sorted(missing)}")
    signature = {name: build.signature.get(name, "constexpr") for name in function.arg_names}
    attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in build.aligned}
    if kernel.language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return Source(function, signature, dict(build.constants), attributes)


def _key(source: Any, build: Build, arch: int, version: str) -> str:
    readers = "".join(Path(p).read_text() for p in (__file__, sass.__file__))
    parts = (source.hash(), build.num_warps, build.num_stages, arch, version, readers)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compile(source: Any, build: Build, arch: int) -> tuple[dict[str, Any], str]:
    import triton
    from triton.backends.compiler import GPUTarget

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": build.num_warps, "num_stages": build.num_stages},
        )
    disassembly, usage = _dump(compiled.asm["cubin"])
    found = sass.resources(usage)
    facts = {
        "opcodes": sass.opcodes(disassembly),
        "regs": found.get("REG", 0),
        "stack": found.get("STACK", 0),
        "smem": int(compiled.metadata.shared),
        "warps": int(compiled.metadata.num_warps),
        "windows": sass.windows(disassembly),
        "warnings": sass.warnings(printed.getvalue()),
    }
    return {"facts": facts}, disassembly


def _dump(cubin: bytes) -> tuple[str, str]:
    """Disassembly with lines of the source, and resource usage, by the tools of the triton wheel."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__path__[0]) / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        commands = ([tools / "nvdisasm", "-c", "-g"], [tools / "cuobjdump", "--dump-resource-usage"])
        first, second = (
            subprocess.run([*c, path], check=True, capture_output=True, text=True).stdout  # noqa: S603
            for c in commands
        )
    return first, second


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


if __name__ == "__main__":
    main()
