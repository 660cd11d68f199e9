"""The run store: one SQLite file that several kernels and processes may use at once.

A connection lives for one call, so the store may be shared by threads and survives forks. Writes are short
transactions in WAL mode with a busy timeout. A file that is damaged is renamed aside, never deleted, and a
new store begins; a file that is something else, or from a newer version, is left alone.
"""

from __future__ import annotations

import builtins
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from workbench.records.runfile import dumps, loads
from workbench.spec.errors import RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

APPLICATION_ID = 0x57425255  # "WBRU": tells a run store from any other SQLite file
BUSY_SECONDS = 30.0
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

# One entry per schema version; a store of version v runs the entries after v. Never edit a released one.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY, created TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL,
            recipe TEXT NOT NULL, recipe_key TEXT NOT NULL, numerics TEXT NOT NULL, dtype TEXT NOT NULL,
            state TEXT NOT NULL, label TEXT NOT NULL, payload TEXT NOT NULL
        )""",
        "CREATE INDEX runs_created ON runs (created)",
        "CREATE INDEX runs_recipe ON runs (recipe_key)",
    ),
)
_USABLE = "Check that the disk has room and the file can be written, or set WORKBENCH_RUNS."
_SUMMARY = "id, created, kind, model, recipe, recipe_key, numerics, dtype, state, label"


@dataclass(frozen=True)
class RunSummary:
    """What a list shows of a stored run; ``recipe`` is what was run, as text, ``created`` UTC, ISO 8601."""

    id: str
    created: str
    kind: str
    model: str
    recipe: str
    recipe_key: str
    numerics: str
    dtype: str
    state: str
    label: str


def default_path() -> Path:
    """``$WORKBENCH_RUNS`` (a file, or a folder), else ``runs.db`` in the user's data folder."""
    named = os.environ.get("WORKBENCH_RUNS")
    if named:
        path = Path(named).expanduser()
        return path / "runs.db" if path.is_dir() else path
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "inference-workbench" / "runs.db"


class RunStore:
    """Runs by id. :class:`RecordError` when the file cannot be used; it says what became of the file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise RecordError(
                f"The run store {self.path} cannot be made: {err.strerror}.",
                hint="Set WORKBENCH_RUNS to a file in a folder that can be written.",
            ) from None
        self._ensure()

    # -- runs --------------------------------------------------------------------------------------

    def save(self, run: Run, label: str = "") -> str:
        """Store a run (replacing one of the same id) and return its id."""
        created = run.provenance.created if run.provenance is not None else ""
        row = (
            run.id,
            created or datetime.now(UTC).isoformat(timespec="seconds"),
            run.kind,
            run.model,
            run.subject,
            run.recipe_key,
            run.numerics,
            run.dtype,
            run.state,
            label,
            dumps(run),
        )
        marks = ", ".join("?" * len(row))
        with self._write() as db:
            db.execute(f"INSERT OR REPLACE INTO runs ({_SUMMARY}, payload) VALUES ({marks})", row)  # noqa: S608
        return run.id

    def get(self, id: str) -> Run:
        """The run of an id or of a prefix that only one id has; raises :class:`RecordError` otherwise."""
        full = self._resolve(id)
        with self._read() as db:
            found = db.execute("SELECT payload FROM runs WHERE id = ?", (full,)).fetchone()
        if found is None:
            raise RecordError(f"Run {full} was deleted meanwhile.")
        try:
            return loads(found[0])
        except RecordError as err:
            raise RecordError(f"Run {full} in {self.path}: {err.message}", hint=err.hint) from None

    def list(
        self,
        *,
        model: str | None = None,
        recipe: Recipe | str | None = None,
        kind: str | None = None,
        label: str | None = None,
        limit: int = 50,
    ) -> tuple[RunSummary, ...]:
        """Stored runs, newest first. ``recipe``: a recipe, its key, or the id of a technique in it."""
        where: builtins.list[str] = []
        values: builtins.list[object] = []
        for column, value in (("model", model), ("kind", kind), ("label", label)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if isinstance(recipe, Recipe):
            where.append("recipe_key = ?")
            values.append(recipe.key)
        elif recipe is not None:
            words = "' ' || replace(replace(recipe, ':', ' '), '+', ' ') || ' '"
            where.append(f"(recipe_key = ? OR instr({words}, ' ' || ? || ' ') > 0)")
            values += [recipe, recipe]
        clause = f"WHERE {' AND '.join(where)}" if where else ""
        query = f"SELECT {_SUMMARY} FROM runs {clause} ORDER BY created DESC, rowid DESC LIMIT ?"  # noqa: S608
        with self._read() as db:
            rows = db.execute(query, (*values, max(limit, 0))).fetchall()
        return tuple(RunSummary(*row) for row in rows)

    def last(self, **filters: Any) -> Run | None:
        """The newest run (of those :meth:`list` would give), or None."""
        newest = self.list(**filters, limit=1)
        return self.get(newest[0].id) if newest else None

    def delete(self, id: str) -> str:
        """Remove one run, by id or unique prefix, and return its id."""
        full = self._resolve(id)
        with self._write() as db:
            db.execute("DELETE FROM runs WHERE id = ?", (full,))
        return full

    def __len__(self) -> int:
        with self._read() as db:
            return int(db.execute("SELECT count(*) FROM runs").fetchone()[0])

    # -- inside ------------------------------------------------------------------------------------

    def _resolve(self, prefix: str) -> str:
        if not prefix:
            raise RecordError(
                "No run id was given.", hint="`workbench compare` takes ids or their first letters."
            )
        with self._read() as db:
            query = "SELECT id FROM runs WHERE substr(id, 1, ?) = ? ORDER BY id LIMIT 4"
            found = [r[0] for r in db.execute(query, (len(prefix), prefix))]
        if prefix in found:
            return prefix
        if not found:
            raise RecordError(f"No run {prefix!r} in {self.path}.", hint="`workbench runs` lists the ids.")
        if len(found) > 1:
            shown = ", ".join(i[: len(prefix) + 4] for i in found)
            raise RecordError(
                f"{prefix!r} is the start of several run ids: {shown}.", hint="Give more letters."
            )
        return str(found[0])

    def _prepare(self) -> None:
        """Create or migrate the schema; the caller holds the file lock."""
        fresh = not self.path.exists()
        with closing(self._connect()) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (app,) = db.execute("PRAGMA application_id").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if app != APPLICATION_ID and tables:
                raise RecordError(
                    f"{self.path} is an SQLite file of something else; it was left alone.",
                    hint="Set WORKBENCH_RUNS to another file.",
                )
            if version > len(MIGRATIONS):
                raise RecordError(
                    f"{self.path} has schema {version}, from a newer version; this knows {len(MIGRATIONS)}.",
                    hint="Update inference-workbench, or set WORKBENCH_RUNS to another file.",
                )
            if fresh:
                self.path.chmod(0o600)  # prompts and outputs are private
            db.execute("PRAGMA journal_mode = WAL").fetchone()
            for number, statements in enumerate(MIGRATIONS[version:], version + 1):
                db.execute("BEGIN IMMEDIATE")
                for statement in statements:
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {number}")
                db.execute("COMMIT")

    def _ensure(self) -> None:
        if self.path.exists() and not self.path.is_file():
            raise RecordError(
                f"The run store {self.path} cannot be used: it is no regular file.",
                hint="Set WORKBENCH_RUNS to a file, or to a folder.",
            )
        with (
            self._guard()
        ):  # at once where no file can be made; waiting for the lock would not tell that apart
            os.close(os.open(self._beside(".lock"), os.O_RDWR | os.O_CREAT, 0o600))
        with self._guard(), FileLock(self._beside(".lock"), timeout=BUSY_SECONDS):
            self._prepare()

    def _connect(self) -> sqlite3.Connection:
        # isolation_level None: transactions are written out, none begins by itself.
        return sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():  # someone deleted it while it was in use
            self._ensure()
        with self._guard(), closing(self._connect()) as db:
            yield db

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            self._ensure()
        with self._guard(), closing(self._connect()) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn what SQLite reports into a :class:`RecordError`; a damaged file is moved aside first."""
        try:
            yield
        except sqlite3.DatabaseError as err:
            if (getattr(err, "sqlite_errorcode", 0) & 0xFF) in _CORRUPT:
                raise self._quarantine(err) from None
            raise RecordError(
                f"The run store {self.path} cannot be used: {err}.",
                hint=_USABLE,
            ) from None
        except (
            OSError
        ) as err:  # of the lock file beside it: a read-only folder, or another process that hangs
            raise RecordError(
                f"The run store {self.path} cannot be used: {err.strerror or err}", hint=_USABLE
            ) from None

    def _quarantine(self, err: sqlite3.DatabaseError) -> RecordError:
        """Rename the damaged store and begin a new one, unless another process has just done so."""
        with FileLock(self._beside(".lock"), timeout=BUSY_SECONDS):
            if self._healthy():
                return RecordError(
                    f"The run store {self.path} was damaged ({err}) and has just been replaced."
                )
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
            for suffix in ("", "-wal", "-shm"):
                part = self._beside(suffix)
                if part.exists():
                    part.rename(aside.with_name(aside.name + suffix))
            self._prepare()
        return RecordError(
            f"The run store {self.path} is damaged ({err}). It was moved to {aside}, nothing was deleted, "
            "and a new store was begun.",
            hint=f"Try `sqlite3 {aside.name} .recover` to save what is readable.",
        )

    def _healthy(self) -> bool:
        try:
            with closing(self._connect()) as db:
                return bool(db.execute("PRAGMA quick_check").fetchone()[0] == "ok")
        except sqlite3.DatabaseError:
            return False

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)
