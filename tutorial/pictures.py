"""Draws what the programs measure; without matplotlib they only print it."""

# Safe for colour-blind readers (Okabe and Ito 2008), and red for waits.
COLOURS = {
    "computing": "#56b4e9",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "wait": "#d62728",
    "update": "#cc79a7",
    "copy": "#e69f00",
    "in flight": "#009e73",
}
# Legible on a white page and on a black one: pictures are transparent.
INK = "#757575"
INKED = [
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "grid.color",
    "xtick.color",
    "ytick.color",
]
OTHERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]


def timelines(path, panels):
    """Draws steps on one scale: `{title: {row: [(what, begin, end), ...]}}`, in ms."""
    counts = [len(rows) for rows in panels.values()]
    figure = _figure(1.1 + 0.5 * len(panels) + 0.36 * sum(counts))
    if not figure:
        return
    ratios = {"height_ratios": counts}
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    kinds = set()
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        for place, spans in enumerate(rows.values()):
            for what, begin, end in spans:
                bar = [(begin, end - begin)], (place - 0.4, 0.8)
                edge = {"edgecolor": "white", "linewidth": 0.5 if what == "in flight" else 0}
                axes.broken_barh(*bar, facecolor=COLOURS[what], **edge)
                kinds.add(what)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    all_axes[-1].set_xlabel("ms")
    all_axes[-1].set_xlim(left=0)
    shown = [what for what in COLOURS if what in kinds]
    handles = [all_axes[0].barh(0, 0, color=COLOURS[what], label=what) for what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), frameon=False)
    _save(figure, path)


def bars(path, panels, log=False):
    """Draws bars with stacked parts: `{(title, unit): {bar: {part: value}}}`."""
    figure = _figure(3.6)
    if not figure:
        return
    for axes, ((title, unit), groups) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        parts = list(dict.fromkeys(part for values in groups.values() for part in values))
        base = [0.0] * len(groups)
        for part, colour in zip(parts, OTHERS, strict=False):
            heights = [values.get(part, 0.0) for values in groups.values()]
            colour = COLOURS.get(part, colour)
            axes.bar(list(groups), heights, 0.6, bottom=base, color=colour, label=part)
            base = [low + high for low, high in zip(base, heights, strict=True)]
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel(unit)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.0e}")  # 1e-16, as the programs print it
        if len(parts) > 1:
            below = -0.1 - 0.07 * max(bar.count("\n") for bar in groups)  # the bars' names
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, below), "ncols": 3}
            axes.legend(**place, frameon=False, fontsize=9)
    _save(figure, path)


def lines(path, title, across, up, points, curves, log=True):
    """Draws points and curves, `{label: (x values, y values)}`, on logarithmic or plain axes."""
    figure = _figure(4.0)
    if not figure:
        return
    axes = figure.subplots()
    for (label, (x, y)), colour in zip(points.items(), OTHERS, strict=False):
        axes.plot(x, y, "o", color=colour, label=label)
    for (label, (x, y)), colour in zip(curves.items(), reversed(OTHERS), strict=False):
        axes.plot(x, y, "-", color=colour, label=label)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log", subs=(2, 5))  # ticks at 1, 2, 5, 10, ...
        axes.xaxis.set_major_formatter("{x:,g}")  # 1,000 instead of 10^3
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)  # beside the curves, not on them
    _save(figure, path)


def tables(path, panels, shade):
    """Draws tables: `{title: rows of (text, share)}`. A share of 0 to 1 is a shade of blue.

    `shade` says below them what the shade means.
    """
    figure = _figure(1.2 + 0.3 * max(len(rows) for rows in panels.values()))
    if not figure:
        return
    for axes, (title, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.imshow([[share for _, share in row] for row in rows], "Blues", vmin=0, vmax=1.6)
        for y, row in enumerate(rows):
            for x, (text, _) in enumerate(row):
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color="black")
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        first = axes is figure.axes[0]
        axes.set_yticks(range(len(rows)), [f"rank {y}" if first else "" for y in range(len(rows))])
        axes.tick_params(length=0)
    figure.supxlabel(shade, fontsize=9)
    _save(figure, path)


def _figure(height):
    try:
        from matplotlib import rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    rcParams.update(dict.fromkeys(INKED, INK))
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, path):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, transparent=True)
    print(f"picture: {path}")
