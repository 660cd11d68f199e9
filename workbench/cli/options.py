"""Options that several commands share, and what is made from them.

Each is an ``Annotated`` type, so that a command's signature is its documentation. Nothing here imports torch:
``--threads`` is put into the environment first, because OpenMP and MKL read it when torch is loaded.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.models.names import DEFAULT_MODEL as DEFAULT_MODEL
from workbench.spec.errors import RecipeError
from workbench.spec.plan import EngineLimits, check_threads
from workbench.spec.recipe import MAX_RECIPE_BYTES, Recipe, Use


class DTypeName(StrEnum):
    """Arithmetic of weights, activations and the plain KV cache."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


class NumericsName(StrEnum):
    """Numerics classes."""

    pinned = "pinned"
    fast = "fast"


_RECIPE, _ENGINE = "Recipe", "Engine"

PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", help="A UTF-8 text file, or - for standard input.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Through the chat template, or as it is. Default: chat where the model has a template.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A name of the registry, a folder, or a .gguf file.")
]
Uses = Annotated[
    list[str],
    typer.Option(
        "--use",
        "-u",
        metavar="ID[:k=v,…]",
        help="Switch a technique on; may be repeated. Also a JSON object.",
        rich_help_panel=_RECIPE,
    ),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="A recipe as a JSON file.", rich_help_panel=_RECIPE)
]
DType = Annotated[
    DTypeName, typer.Option("--dtype", help="Arithmetic of the model.", rich_help_panel=_ENGINE)
]
Numerics = Annotated[
    NumericsName,
    typer.Option(
        "--numerics",
        help="pinned: the same bits whatever the batch; fast: kernels by row count.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads; default: torch's choice.", rich_help_panel=_ENGINE),
]
PoolTokens = Annotated[
    int,
    typer.Option("--kv-pool-tokens", help="KV slots allocated per group of layers.", rich_help_panel=_ENGINE),
]
MaxContext = Annotated[
    int,
    typer.Option(
        "--max-context",
        min=0,
        help="Longest prompt and output together; 0: the model's, at most 2048.",
        rich_help_panel=_ENGINE,
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling.")]

DEFAULT_POOL = EngineLimits().kv_pool_tokens


def recipe_of(uses: list[str], file: Path | None) -> Recipe:
    """The recipe of ``--recipe`` with every ``--use`` added to it, or replaced in it, in order.

    Raises :class:`RecipeError` for what cannot be read, and for a technique that ``--use`` names twice.
    """
    recipe = Recipe() if file is None else read_recipe(file)
    named = Recipe(tuple(Use.parse(text) for text in uses))
    for use in named:
        recipe = recipe.with_(use)
    return recipe


def read_recipe(file: Path) -> Recipe:
    """The recipe in a JSON file. Raises :class:`RecipeError` when it is absent, huge or malformed."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_RECIPE_BYTES + 1)
        return Recipe.from_json(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(
            f"The recipe {str(file)!r} cannot be read: {why}.",
            hint='Give a JSON file such as ["paged", {"id": "kivi", "bits": 2}].',
        ) from None


def place_of(dtype: DTypeName, numerics: NumericsName, device: str, **more: Any) -> dict[str, Any]:
    """What a session is opened with, from the flags of the same names."""
    return {"dtype": dtype.value, "numerics": numerics.value, "device": device, **more}


def limits_of(pool_tokens: int, max_context: int) -> EngineLimits:
    """Engine limits from the two flags; ranges are checked by the plan, which knows the model."""
    return EngineLimits(kv_pool_tokens=pool_tokens, max_context=max_context)


def set_threads(threads: int | None) -> None:
    """Make ``--threads`` the number that OpenMP and MKL will read when torch is imported.

    Raises :class:`OptionError` for numbers that are not possible.
    """
    check_threads(threads)
    if threads is None:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
