"""The `muonloom` command. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="muonloom",
    help="Muon for models whose optimizer state does not fit.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what a user can put right into one line on stderr and exit code 2; Ctrl-C into 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise _exit("interrupted", INTERRUPTED) from None
    except FileNotFoundError as error:
        name = error.filename or str(error)
        raise _exit(f"{name}: got no such file; wanted one that exists.", USER_ERROR) from None
    except (ValueError, FloatingPointError) as error:
        raise _exit(" ".join(str(error).split()), USER_ERROR) from None


def _exit(line: str, code: int) -> typer.Exit:
    typer.echo(f"muonloom: {line}", err=True)
    return typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"muonloom {version('muonloom')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="TOML file that describes the run.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in optim.lr=0.02."),
    ] = None,
) -> None:
    """Train a causal LM as a TOML file describes."""
    with _plain_errors():
        raise typer.Exit(_train(config, overrides or []))


def _train(config: Path, overrides: list[str]) -> int:
    from rich.console import Console

    from muonloom.train.run import train as run

    # Where no terminal tells its width, Rich takes 80 columns, which is narrow for tables in a log.
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return run(config, overrides, console=console)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show what a user should know, without the line of code that said so."""
    typer.echo(f"muonloom: warning: {' '.join(str(message).split())}", err=True)


@app.command()
def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="config.json, a directory with a model, or a training TOML "
            "(whose [optim] options are used).",
        ),
    ],
    heads_per_block: Annotated[
        int | None, typer.Option(min=1, help="Cut attention projections into blocks of K heads.")
    ] = None,
    mla_components: Annotated[
        bool, typer.Option(help="Cut MLA heads into their components too.")
    ] = False,
    cut_output: Annotated[
        bool, typer.Option(help="Cut the output projection by heads too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how a model's parameters are cut into matrices, and what state they need."""
    with _plain_errors():
        from muonloom.inspection import run_inspect

        if target.suffix == ".toml":
            _check_training_file(target)
        run_inspect(
            target,
            heads_per_block=heads_per_block,
            mla_components=mla_components,
            cut_output=cut_output,
            as_json=json,
        )


def _check_training_file(path: Path) -> None:
    """Refuse what `train` would refuse, so that both speak of the same model."""
    from muonloom.train.config_file import load_config
    from muonloom.train.model import make_transformers_config

    model = load_config(path).model
    if model.config is not None:
        make_transformers_config(model.config)


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a directory of them: then the newest."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to make; it must not exist.")
    ],
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float8_block.")
    ] = "bfloat16",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR_OR_CONFIG",
            help="Directory of a model, or its config.json, where the checkpoint has none.",
        ),
    ] = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Of weights in a file.")] = 5_000_000_000,
    max_bytes: Annotated[
        int, typer.Option(help="Memory beside the one tensor that is being made.")
    ] = 1 << 30,
) -> None:
    """Write the model of a checkpoint, from its FP32 masters, as Transformers loads it."""
    with _plain_errors():
        from muonloom.export_command import run_export

        done = run_export(
            checkpoint,
            out,
            dtype=dtype,
            model=model,
            max_shard_bytes=max_shard_bytes,
            max_bytes=max_bytes,
        )
    if done.ragged:
        typer.echo(
            f"muonloom: warning: {len(done.ragged)} FP8 matrices, such as {done.ragged[0]}, end in blocks "
            "of less than 128 × 128: Transformers refuses or misreads them where it dequantizes.",
            err=True,
        )
    typer.echo(
        f"{out}: {done.num_tensors:,} tensors, {done.nbytes:,} bytes (files: {done.num_files:,}), "
        f"from step {done.step:,} in {done.checkpoint}"
    )


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    quick: Annotated[bool, typer.Option(help="Few repetitions, small shapes.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    only: Annotated[
        str | None,
        typer.Option(help="Run one part: orthogonalization, step, split or staging."),
    ] = None,
) -> None:
    """Measure the optimizer's step against its peers, and host placement against the device."""
    with _plain_errors():
        from muonloom.bench import run_bench

        run_bench(out=out, quick=quick, threads=threads, only=only)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
