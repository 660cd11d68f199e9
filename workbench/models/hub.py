"""Downloading a pinned repository from the Hugging Face hub, when it can be reached.

Reachability is asked once per process, in at most three seconds: name resolution has no time
limit of its own, so the question runs in a thread that may be left behind.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

from workbench.models.cache import sha256_file
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.registry import HubSource
from workbench.spec.errors import DownloadRefused

PROBE_SECONDS = 3.0
FILES = [
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def offline() -> bool:
    """Whether the environment forbids the hub (``HF_HUB_OFFLINE``)."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


@cache
def reachable() -> bool:
    """Whether the hub answers, asked once and for at most three seconds; false when offline."""
    if offline():
        return False
    answer: list[bool] = []

    def ask() -> None:
        from huggingface_hub import constants, get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            answer.append(True)
        except Exception:  # whatever the hub's client raises, the answer is no
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answer and answer[0])


def download(
    source: HubSource, folder: Path, progress: Progress | None = None, cancel: Cancel | None = None
) -> None:
    """Fill ``folder`` with the repository's files and check their sha256.

    Partial downloads resume from the hub's own cache. Raises ``DownloadRefused`` when the hub fails
    or a file's content is not the pinned one, ``Cancelled`` between files.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        listed = HfApi().list_repo_files(source.repo, revision=source.revision)
        wanted = [f for f in listed if any(Path(f).match(p) for p in FILES) and "/" not in f]
        for i, name in enumerate(wanted):
            check_cancel(cancel, f"Downloading {source.repo}")
            report(progress, i / len(wanted), f"downloading {source.repo}/{name}")
            hf_hub_download(source.repo, name, revision=source.revision, local_dir=folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise DownloadRefused(
            f"The hub did not deliver {source.repo}: {error}",
            hint="Try again, or set HF_HUB_OFFLINE=1 to use the next source.",
        ) from error
    for name, expected in source.sha256.items():
        found = sha256_file(folder / name, cancel) if (folder / name).is_file() else "nothing"
        if found != expected:
            raise DownloadRefused(
                f"{source.repo}/{name} has sha256 {found}, but {expected} is pinned.",
                hint="The file changed on its way; it was not used.",
            )
