"""Shows what each service is doing: a live list on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table


class Board:
    """Call it with a name and what that name does now. Live while inside the `with` block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, name: str, doing: str) -> None:
        if self._live is None:
            self._console.print(f"{name:<12} {doing}", highlight=False, markup=False)
            return
        self._rows[name] = doing
        table = Table.grid(padding=(0, 2))
        for row, text in self._rows.items():
            mark = "[green]●[/]" if text.startswith("ready") else "[yellow]○[/]"
            table.add_row(mark, row, text)
        self._live.update(table)
