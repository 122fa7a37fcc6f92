"""Charts over the training: returns, options, values, waiting, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from reporting.aggregate import Estimate, band, thin
from reporting.charts import Chart, faded, line_style, new_figure, number, numbers, option_color, percent
from reporting.runs import Group, Run

STEPS, MINUTES = "environment steps", "wall time [minutes]"
#: Worker events that belong on the curves.
MARKED = ("death", "hang", "restart", "give_up")
MARKS = {"death": "x", "hang": "diamond", "restart": "triangle-up", "give_up": "square"}


def learning_curves(groups: Sequence[Group], kind: str, axis: str) -> Chart | None:
    """Return or success of all groups.

    Args:
        groups: a line for evaluations and a thin one for training episodes each.
        kind: ``return`` or ``success``.
        axis: ``steps`` or ``minutes``.
    """
    figure = new_figure(
        STEPS if axis == "steps" else MINUTES, "return per episode" if kind == "return" else "share of episodes"
    )
    told: list[str] = []
    for index, group in enumerate(groups):
        style = line_style(index)
        for prefix, words in (("rollout", "training"), ("val", "evaluation")):
            curves = [run.curves[f"{prefix}/{kind}"] for run in group.runs if f"{prefix}/{kind}" in run.curves]
            curves = [curve for curve in curves if np.isfinite(curve.values).any()]
            if not curves:
                continue
            merged = band(curves, axis)
            is_val, name = prefix == "val", f"{group.letter}, {words}" if len(groups) > 1 else words
            if len(curves) > 1 and is_val:
                edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
                figure.add_scatter(x=numbers(merged.x), y=numbers(merged.high), **edge)
                figure.add_scatter(
                    x=numbers(merged.x),
                    y=numbers(merged.low),
                    fill="tonexty",
                    fillcolor=faded(style["color"], 0.2),
                    **edge,
                )
            line = style if is_val else {**style, "width": 1.5, "dash": "dot"}
            figure.add_scatter(
                x=numbers(merged.x),
                y=numbers(merged.center),
                name=name,
                line=line,
                customdata=merged.count,
                mode="lines+markers" if is_val and len(merged.x) <= 40 else "lines",
                opacity=1.0 if is_val else 0.8,
                hovertemplate="%{y:.4g} at %{x:,.4g}, %{customdata} run(s)<extra>" + name + "</extra>",
            )
            if is_val or not any(each.startswith(name) for each in told):
                told.append(
                    f"{name}: from {number(merged.center[0])} to {number(merged.center[-1])} "
                    f"at {number(merged.x[-1])} {STEPS if axis == 'steps' else 'minutes'}"
                )
    if not told:
        return None
    if kind == "success":
        figure.update_yaxes(range=[-0.03, 1.03])
    _mark_events(figure, groups, axis)
    title = "Return" if kind == "return" else "Success"
    what = "Higher is better" if kind == "return" else "1 means that every episode reached the goal"
    return Chart(
        f"{title} over {'environment steps' if axis == 'steps' else 'wall time'}",
        f"{what}; thick: noise-free evaluation, thin and dotted: training episodes with exploration; over several "
        f"seeds the "
        "line is the interquartile mean of those that got so far, the band their least and largest evaluation.",
        f"{title} of {'; '.join(told)}.",
        figure,
        340,
    )


def _mark_events(figure: go.Figure, groups: Sequence[Group], axis: str) -> None:
    """Failures of workers, at the bottom of a learning curve."""
    marks: dict[str, list[tuple[float, str]]] = {}
    for group in groups:
        for run in group.runs:
            for each in run.events or []:
                if each.event in MARKED:
                    words = f"{run.folder.name}, {each.worker}: {each.event} {each.detail[:80]}"
                    at = each.env_steps if axis == "steps" else each.seconds / 60
                    marks.setdefault(each.event, []).append((at, words))
    if not marks:
        return
    figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True})
    for event, found in marks.items():
        found = found[:: max(1, len(found) // 200)]
        figure.add_scatter(
            x=[at for at, _ in found],
            y=[0.03] * len(found),
            yaxis="y2",
            mode="markers",
            name=f"worker: {event}",
            text=[words for _, words in found],
            hovertemplate="%{text}<extra></extra>",
            marker={"symbol": MARKS[event], "size": 10, "color": "#7D8790"},
        )


def estimates(
    rows: Mapping[str, Estimate],
    what: str,
    unit: str,
    how: str,
    limits: tuple[float, float] | None = None,
    is_chance: bool = False,
) -> Chart:
    """A dot and an interval per row; with ``is_chance`` a line at one half."""
    figure = new_figure(unit, "", yaxis={"autorange": "reversed", "automargin": True}, showlegend=False)
    for index, (name, each) in enumerate(rows.items()):
        figure.add_scatter(
            x=[each.center],
            y=[name],
            mode="markers",
            marker={"size": 12, "color": line_style(index)["color"]},
            error_x={
                "array": [each.high - each.center],
                "arrayminus": [each.center - each.low],
                "thickness": 3,
                "width": 8,
            },
            hovertemplate=f"{number(each.center)} [{number(each.low)}, {number(each.high)}]<extra></extra>",
        )
    if limits is not None:
        figure.update_xaxes(range=list(limits))
    if is_chance:
        figure.add_vline(x=0.5, line={"dash": "dot", "color": "#7D8790"})
    alt = "; ".join(
        f"{name}: {number(e.center)}, interval {number(e.low)} to {number(e.high)}" for name, e in rows.items()
    )
    return Chart(what, how, f"{what}. {alt}.", figure, 110 + 46 * len(rows))


def lines(
    run: Run,
    names: Mapping[str, str],
    title: str,
    unit: str,
    how: str,
    *,
    colors: Sequence[str] = (),
    height: int = 280,
) -> Chart | None:
    """Logged names of one run over environment steps, under the words given; None where it has none of them."""
    figure = new_figure(STEPS, unit)
    told = []
    for index, (name, words) in enumerate(names.items()):
        curve = run.curves.get(name)
        if curve is None or not np.isfinite(curve.values).any():
            continue
        style = {"color": colors[index], "width": 2} if colors else line_style(index)
        x, y = thin(curve.steps, curve.values)
        figure.add_scatter(
            x=numbers(x),
            y=numbers(y),
            name=words,
            line=style,
            mode="lines" if len(x) > 1 else "markers",
            hovertemplate="%{y:.4g} at %{x:,.0f} steps<extra>" + words + "</extra>",
        )
        told.append(f"{words} ends at {number(curve.last)}")
    if not told:
        return None
    figure.update_layout(showlegend=True)
    return Chart(title, how, f"{title} over {STEPS}: {'; '.join(told)}.", figure, height)


def option_usage(run: Run) -> Chart | None:
    """Shares of the options as a stack."""
    figure = new_figure(STEPS, "share of steps", yaxis={"range": [0, 1]})
    told = []
    for name in run.names("option/share_"):
        option, curve = int(name.rsplit("_", 1)[1]), run.curves[name]
        # The same points of all curves, or the stack would not add up.
        every = max(1, len(curve.steps) // 300)
        figure.add_scatter(
            x=numbers(curve.steps[::every]),
            y=numbers(curve.values[::every]),
            stackgroup="options",
            mode="lines",
            name=f"option {option}",
            line={"width": 0.5, "color": option_color(option)},
            fillcolor=faded(option_color(option), 0.85),
            hovertemplate="%{y:.0%} at %{x:,.0f} steps<extra>option " + str(option) + "</extra>",
        )
        told.append(f"option {option} ends at {percent(curve.last)}")
    if not told:
        return None
    return Chart(
        "Use of the options over the training",
        "The height of a colour is the share of the learned-from steps in which that option ran; a colour that "
        "vanishes is an "
        "option that is no longer used.",
        f"Share of each option over {STEPS}: {', '.join(told)}.",
        figure,
    )


def option_durations(run: Run) -> Chart | None:
    """Mean length of spells per option; of all together in runs that log no more."""
    names = {name: f"option {name.rsplit('_', 1)[1]}" for name in run.names("option/duration_")}
    colors = [option_color(int(name.rsplit("_", 1)[1])) for name in names]
    if not names:
        names, colors = {"option/mean_duration": "all options"}, []
    how = "How many steps an option runs before it ends; near 1 it is chosen anew at every step."
    return lines(run, names, "Duration of the options over the training", "steps", how, colors=colors)


def termination_heat(run: Run, option: int) -> Chart | None:
    """Time x probability of ending."""
    # How to read it is said once above the charts of all options.
    heat = run.heats.get(option)
    if heat is None or not len(heat.steps):
        return None
    every = max(1, len(heat.steps) // 150)
    shares, bins = heat.shares[::every], heat.shares.shape[1]
    figure = new_figure(
        STEPS, "probability of ending", xaxis={"range": [0, float(heat.steps[-1])]}, yaxis={"range": [0, 1]}
    )
    color = option_color(option)
    figure.add_heatmap(
        x=numbers(heat.steps[::every]),
        y=numbers((np.arange(bins) + 0.5) / bins),
        z=numbers(shares.T),
        zmin=0,
        # Most of the mass lies in few bins; without the bend of the scale the rest would not be seen.
        colorscale=[[0, faded(color, 0.0)], [0.1, faded(color, 0.35)], [0.5, faded(color, 0.8)], [1, color]],
        colorbar={"title": {"text": "share"}, "thickness": 10, "tickformat": ".0%"},
        hovertemplate="%{z:.1%} of the steps at %{x:,.0f}: probability about %{y:.2f}<extra></extra>",
    )
    mean = heat.shares @ ((np.arange(bins) + 0.5) / bins)
    return Chart(
        f"Option {option}: how likely it ends",
        "",
        f"Probability of ending of option {option}: on average {mean[0]:.2f} at first, {mean[-1]:.2f} at last.",
        figure,
        260,
    )


def by_process(run: Run, prefix: str, suffix: str, title: str, unit: str, how: str) -> Chart | None:
    """One line per process of a run."""
    found = [name for name in run.names(prefix) if name.endswith(suffix) and not name.endswith("/free_gb")]
    words = {name: name.removeprefix(prefix).removesuffix(suffix) for name in found}
    return lines(
        run, {name: each.replace("forward_backward", "learning") for name, each in words.items()}, title, unit, how
    )
