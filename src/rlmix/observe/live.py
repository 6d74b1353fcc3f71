"""The view of a running training run in the terminal.

On a terminal it redraws one block of text; where output goes to a file it prints one plain line
per step (and per new phase) instead. Nothing is drawn unless `update` is called, and drawing is
paced by its own measured cost: at most four times a second, and never more than
`MAX_CPU_FRAC` of one core, because the cores belong to the run.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rlmix.observe import figures
from rlmix.observe.live_state import LiveState, PoolState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

MIN_INTERVAL_S = 0.25
MAX_CPU_FRAC = 0.015
NARROW_COLUMNS = 100
"""Below this width the accelerator and price columns are left out."""
NUM_EVENTS = 4


def open_console(*, is_json: bool) -> "Console":
    """Where human output goes: stdout, or stderr when stdout carries a JSON document."""
    from rich.console import Console

    return Console(stderr=is_json, highlight=False)


class LiveView:
    """Use as a context manager; call `update` as often as is convenient, from one thread."""

    def __init__(
        self,
        console: "Console",
        *,
        is_enabled: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            console: from `open_console`.
            is_enabled: False for plain lines even on a terminal (`observe.live`).
        """
        self._console = console
        self._is_drawing = is_enabled and console.is_terminal and not console.is_dumb_terminal
        self._monotonic = monotonic
        self._cpu_time = cpu_time
        self._live: Live | None = None
        self._pending: LiveState | None = None
        self._next_draw_s = float("-inf")
        self._printed_step = 0
        self._printed_phases: set[str] = set()
        self._printed_alarms: set[str] = set()

    def __enter__(self) -> "LiveView":
        if self._is_drawing:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                auto_refresh=False,
                vertical_overflow="ellipsis",
                # On stderr the block must not swallow the document that stdout carries.
                redirect_stdout=not self._console.stderr,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            if self._pending is not None:
                self._draw(self._pending)
            self._live.stop()
            self._live = None

    def update(self, state: LiveState) -> None:
        """Show `state`, now or (when the last drawing was too recent) at a later update."""
        if not self._is_drawing:
            self._print_news(state)
            return
        self._pending = state
        if self._live is not None and self._monotonic() >= self._next_draw_s:
            self._draw(state)

    def note(self, text: str) -> None:
        """Print a line that stays, above the moving block."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _draw(self, state: LiveState) -> None:
        assert self._live is not None
        started_s = self._cpu_time()
        width = self._console.width
        self._live.update(
            live_block(state, width=width, ascii_only=self._console.options.ascii_only),
            refresh=True,
        )
        cost_s = self._cpu_time() - started_s
        self._next_draw_s = self._monotonic() + max(MIN_INTERVAL_S, cost_s / MAX_CPU_FRAC)
        self._pending = None

    def _print_news(self, state: LiveState) -> None:
        if state.phase not in self._printed_phases:
            self._printed_phases.add(state.phase)
            self.note(f"[{figures.duration(state.elapsed_s)}] {state.run}: {state.phase}")
        if state.step > self._printed_step:
            self._printed_step = state.step
            self.note(step_line(state))
        for name, text in state.alarms.items():
            if name not in self._printed_alarms:
                self.note(f"ALARM {text}")
        self._printed_alarms = set(state.alarms)


def step_line(state: LiveState) -> str:
    """The last step in one line, for logs."""
    metrics = state.metrics
    parts = [
        f"step {state.step}/{state.num_steps}",
        f"reward {figures.decimal(metrics.get('reward/mean'))}",
        f"k3 {figures.small(metrics.get('mismatch/k3_kl'))}",
        f"masked {figures.percent(metrics.get('correction/masked_frac'), 2)}",
        f"staleness {figures.decimal(metrics.get('staleness/mean_versions'), 1)}",
        f"tokens {figures.count(metrics.get('rollout/tokens'))}",
        f"cost {figures.usd(metrics.get('cost/step_usd'))}"
        f" ({figures.usd(metrics.get('cost/trajectory_usd'))} each)",
        f"{figures.decimal(metrics.get('time/step_s'), 1)} s",
        f"left {figures.duration(state.eta_s)}",
    ]
    return "  ".join(parts)


def live_block(state: LiveState, *, width: int, ascii_only: bool = False) -> "RenderableType":
    """The whole block for a terminal of `width` columns."""
    from rich.console import Group

    parts: list[RenderableType] = [_header(state), _pools_table(state.pools, width=width)]
    parts.append(_progress(state, width=width, ascii_only=ascii_only))
    if state.rewards:
        parts.append(_rewards(state, width=width, ascii_only=ascii_only))
    if state.metrics:
        parts.append(_last_metrics(state))
    if state.operation:
        parts.append(_line((f"scaling   {state.operation}"[: max(width, 20)], "cyan")))
    alarms = [f"ALARM {text}"[: max(width, 20)] for text in state.alarms.values()]
    parts.extend(_line((text, "bold red")) for text in alarms)
    parts.extend(_events(state, width=width))
    return Group(*parts)


def _line(*pieces: tuple[str, str] | str) -> "Text":
    from rich.text import Text

    return Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")


def _header(state: LiveState) -> "Text":
    version = "" if state.policy_version is None else f"  policy v{state.policy_version}"
    return _line(
        ("rlmix ", "bold"),
        (state.run, "bold cyan"),
        f"  step {state.step}/{state.num_steps}{version}  ",
        (state.phase, "bold"),
        f"  {figures.duration(state.elapsed_s)} elapsed, {figures.duration(state.eta_s)} left",
        f"  {figures.usd(state.cost_usd)} modelled"
        if _is_modelled(state)
        else f"  {figures.usd(state.cost_usd)}",
    )


def _is_modelled(state: LiveState) -> bool:
    return any(pool.is_emulated for pool in state.pools)


def _pools_table(pools: tuple[PoolState, ...], *, width: int) -> "Table":
    from rich import box
    from rich.table import Table

    is_wide = width >= NARROW_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("pool", no_wrap=True)
    if is_wide:
        table.add_column("accelerator", no_wrap=True)
    table.add_column("weights/kv", no_wrap=True)
    for name in ("ready", "run", "queue", "tok/s", "version", "k3"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("$/h", justify="right", no_wrap=True)
    for pool in pools:
        is_short = pool.replicas_ready < pool.replicas_total
        ready = f"{pool.replicas_ready}/{pool.replicas_total}"
        cells = [
            pool.name,
            *([_accelerator(pool)] if is_wide else []),
            f"{pool.weights}/{pool.kv}",
            f"[yellow]{ready}[/]" if is_short else ready,
            str(pool.running),
            str(pool.queued),
            figures.count(pool.tokens_per_s),
            figures.MISSING if pool.version is None else f"v{pool.version}",
            figures.small(pool.k3_kl),
            *([figures.decimal(pool.usd_per_hour, 2)] if is_wide else []),
        ]
        table.add_row(*cells)
    if not is_wide and any(pool.is_emulated for pool in pools):
        table.caption = "accelerators are emulated"
        table.caption_justify = "left"
    return table


def _accelerator(pool: PoolState) -> str:
    return f"{pool.accelerator} [dim](emulated)[/]" if pool.is_emulated else pool.accelerator


def _progress(state: LiveState, *, width: int, ascii_only: bool) -> "Text":
    label = f" {state.done}/{state.needed} {state.unit}"
    room = max(10, min(60, width - len(label) - 12))
    filled = 0 if state.needed <= 0 else min(room, room * state.done // state.needed)
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    return _line(
        "next step " if state.unit == "sessions" else "progress  ",
        (full * filled, "green"),
        (empty * (room - filled), "dim"),
        label,
    )


def _rewards(state: LiveState, *, width: int, ascii_only: bool) -> "Text":
    shown = max(10, min(60, width - 40))
    line = figures.sparkline(state.rewards, width=shown, ascii_only=ascii_only)
    rewards = state.rewards[-shown:]
    return _line(
        "reward    ",
        (line, "cyan"),
        f" {state.rewards[-1]:.3f} (low {min(rewards):.3f}, high {max(rewards):.3f})",
    )


def _last_metrics(state: LiveState) -> "Text":
    metrics = state.metrics
    pieces = (
        f"k3 {figures.small(metrics.get('mismatch/k3_kl'))}",
        f"masked {figures.percent(metrics.get('correction/masked_frac'), 2)}",
        f"ess {figures.percent(metrics.get('correction/ess_frac'), 0)}",
        f"staleness {figures.decimal(metrics.get('staleness/mean_versions'), 1)}",
        f"grad {figures.decimal(metrics.get('loss/grad_norm'), 2)}",
        f"step {figures.decimal(metrics.get('time/step_s'), 1)} s",
        f"{figures.usd(metrics.get('cost/step_usd'))}",
        f"1k tokens {figures.usd(metrics.get('cost/per_1k_tokens_usd'))}",
        f"void {figures.percent(metrics.get('rollout/void_frac'), 1)}",
    )
    return _line(("last step ", ""), ("  ".join(pieces), "dim"))


def _events(state: LiveState, *, width: int) -> list["Text"]:
    lines = []
    for event in state.events[-NUM_EVENTS:]:
        style = "yellow" if _is_trouble(event.kind) else "dim"
        text = f"{figures.duration(event.run_s):>9} {event.kind}: {event.reason}"
        lines.append(_line((text[: max(width, 20)], style)))
    return lines


def _is_trouble(kind: str) -> bool:
    return kind.endswith(("_lost", "_failed", "_refused", "_repaired", "_quarantined", "_raised"))
