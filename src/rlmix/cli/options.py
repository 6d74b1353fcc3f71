"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values to change, and files to choose."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; everything else to stderr.")
]
ConfDir = Annotated[
    Path | None, typer.Option("--conf-dir", metavar="DIR", help="A folder with YAML of your own.")
]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Name or folder of a run; the newest if left out."),
]
RunsDir = Annotated[Path | None, typer.Option("--dir", metavar="DIR", help="Folder of all runs.")]
