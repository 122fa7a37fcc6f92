"""Charts of recorded episodes: their course, what each option is like, and values against returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly.subplots import make_subplots

from reporting.aggregate import MAX_POINTS
from reporting.charts import (
    LEFT,
    LINE_COLORS,
    Chart,
    faded,
    new_figure,
    number,
    numbers,
    option_color,
    percent,
    text_color,
)
from reporting.episodes import PHASE_BINS, OptionFigures, Recording, Values

#: Right of the timeline there is room for half a picture of the film strip.
STRIP_RIGHT = 48


def timeline(recording: Recording, episode: int) -> Chart:
    """Which option runs at which step, how likely it ends there, and which one would be chosen.

    Where options end if that is more likely than not (``is_greedy``), the chart has a line there.
    """
    index = recording.of(episode)
    step = recording.step[index]
    has_options = recording.num_options > 1
    rows = ["option", "ends", "preference", "reward"] if has_options else ["reward"]
    figure = make_subplots(
        rows=len(rows),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.05,
        row_heights=[0.3, 0.22, 0.26, 0.22] if has_options else [1.0],
    )
    told = []
    if has_options:
        spells = [each for each in recording.spells() if recording.episode[each.first] == episode]
        for option in range(recording.num_options):
            own = [each for each in spells if each.option == option]
            color = option_color(option)
            figure.add_bar(
                orientation="h",
                base=[float(recording.step[each.first]) - 0.5 for each in own],
                x=[each.length for each in own],
                y=[f"option {option}"] * len(own),
                marker={"color": color},
                text=[str(option) if each.length > 1 else "" for each in own],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont={"color": text_color(color)},
                width=0.9,
                showlegend=False,
                name=f"option {option}",
                customdata=[(int(recording.step[e.first]), int(recording.step[e.first]) + e.length - 1) for e in own],
                hovertemplate="option " + str(option) + ", steps %{customdata[0]} to %{customdata[1]}<extra></extra>",
                row=1,
                col=1,
            )
            figure.add_scatter(
                x=numbers(step),
                y=numbers(recording.option_probs[index, option]),
                stackgroup="preference",
                mode="lines",
                line={"width": 0, "shape": "hvh"},
                fillcolor=faded(color, 0.85),
                showlegend=False,
                name=f"option {option}",
                hovertemplate="%{y:.0%} at step %{x}<extra>option " + str(option) + "</extra>",
                row=3,
                col=1,
            )
        figure.add_scatter(
            x=numbers(step),
            y=numbers(recording.termination[index]),
            mode="lines+markers",
            connectgaps=False,
            line={"color": LINE_COLORS[3], "width": 1.5},
            showlegend=False,
            name="ends",
            marker={"size": 5, "color": [option_color(int(each)) for each in recording.arriving[index]]},
            hovertemplate="%{y:.2f} at step %{x}<extra>probability of ending</extra>",
            row=2,
            col=1,
        )
        figure.update_yaxes(
            row=1,
            col=1,
            tickvals=[f"option {k}" for k in range(recording.num_options)],
            ticktext=[str(k) for k in range(recording.num_options)],
            # Also of options that do not run in this episode.
            categoryorder="array",
            categoryarray=[f"option {k}" for k in range(recording.num_options)],
            range=[recording.num_options - 0.5, -0.5],
            title={"text": "option"},
        )
        if recording.is_greedy:
            figure.add_hline(y=0.5, line={"color": LINE_COLORS[3], "dash": "dot", "width": 1}, row=2, col=1)
        figure.update_yaxes(range=[0, 1.05], row=2, col=1, title={"text": "p(end)"})
        figure.update_yaxes(range=[0, 1], row=3, col=1, title={"text": "preference"})
        course = ", ".join(f"{each.option} for {each.length}" for each in spells[:8])
        told.append(f"options in turn: {course} steps{' and so on' if len(spells) > 8 else ''}")
    figure.add_scatter(
        x=numbers(step),
        y=numbers(recording.reward[index]),
        mode="lines",
        line={"color": LINE_COLORS[0], "width": 1.5},
        showlegend=False,
        name="reward",
        hovertemplate="%{y:.3g} at step %{x}<extra>reward</extra>",
        row=len(rows),
        col=1,
    )
    figure.update_yaxes(title={"text": "reward"}, row=len(rows), col=1)
    figure.update_xaxes(range=[-0.5, float(step[-1]) + 0.5])
    figure.update_xaxes(title={"text": "step of the episode"}, row=len(rows), col=1)
    figure.update_layout(
        template=None, barmode="overlay", hovermode="closest", margin={"l": LEFT, "r": STRIP_RIGHT, "t": 8, "b": 44}
    )
    told.append(f"return {number(float(recording.reward[index].sum()))} in {len(index)} steps")
    how = "Reward at every step of the episode."
    if has_options:
        rule = "; above the dotted line it ends" if recording.is_greedy else ""
        how = (
            "From top to bottom: which option runs (a bar per spell); the probability that the running one ends at "
            f"each step (dots in its colour{rule}); what would be chosen next (the taller, the likelier); the reward."
        )
    return Chart(
        "The episode, step by step",
        how,
        f"Episode {episode + 1}: {'; '.join(told)}.",
        figure,
        430 if has_options else 200,
    )


def phase_chart(figures: OptionFigures, option: int) -> Chart:
    """When in the episode an option runs."""
    figure = new_figure("part of the episode [%]", "share of steps", showlegend=False, bargap=0.05)
    color = option_color(option)
    x = (np.arange(PHASE_BINS) + 0.5) * 100 / PHASE_BINS
    figure.add_bar(
        x=numbers(x),
        y=numbers(figures.phases),
        marker={"color": color},
        hovertemplate="%{y:.0%} of the steps<extra></extra>",
    )
    figure.update_yaxes(range=[0, max(0.05, 1.1 * float(figures.phases.max()))], tickformat=".0%")
    figure.update_xaxes(range=[0, 100])
    figure.update_layout(margin={"t": 6})
    return Chart(
        "When it runs",
        "",
        f"Option {option} runs in "
        + ", ".join(percent(float(value)) for value in figures.phases)
        + " of the steps of each tenth.",
        figure,
        190,
    )


def action_chart(figures: OptionFigures, option: int, components: Sequence[str]) -> Chart | None:
    """In which components of the action, given by name, an option differs from all of them."""
    if not figures.components:
        return None
    figure = new_figure("difference [standard deviations]", "", showlegend=False, bargap=0.25)
    names = [components[each] for each in figures.components]
    figure.add_bar(
        orientation="h",
        x=numbers(figures.differences),
        y=names,
        marker={"color": option_color(option)},
        hovertemplate="%{y}: %{x:+.2f}<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    limit = max(0.5, 1.1 * max(abs(each) for each in figures.differences))
    figure.update_xaxes(range=[-limit, limit], zeroline=True)
    figure.update_layout(margin={"t": 6, "l": 90})
    return Chart(
        "What it does differently",
        "",
        f"Option {option} differs most in "
        + ", ".join(f"{name} ({value:+.1f})" for name, value in zip(names, figures.differences, strict=True))
        + ".",
        figure,
        70 + 22 * len(names),
    )


def transition_chart(options: Sequence[OptionFigures]) -> Chart:
    """Which option follows which."""
    names = [str(each) for each in range(len(options))]
    table = np.stack([each.follows for each in options])
    figure = new_figure("option chosen next", "option that has ended", showlegend=False)
    labels = [[f"{value:.0%}" if value >= 0.005 else "" for value in row] for row in table]
    figure.add_heatmap(
        x=names,
        y=names,
        z=numbers(table),
        zmin=0,
        zmax=1,
        colorscale=[[0, "rgba(123,104,238,0)"], [1, "rgba(123,104,238,0.9)"]],
        text=labels if len(options) <= 12 else None,
        texttemplate="%{text}" if len(options) <= 12 else None,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate="after option %{y}: option %{x} in %{z:.0%}<extra></extra>",
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed")
    follow = [
        f"after {k} comes {int(row.argmax())} in {percent(float(row.max()))}"
        for k, row in enumerate(table)
        if row.max() > 0
    ]
    return Chart(
        "What follows what",
        "Read a row: when that option ends, how often is each one chosen next; the diagonal is the same option again.",
        "Transitions: " + ("; ".join(follow) or "no option ever ended") + ".",
        figure,
        min(520, 130 + 46 * len(options)),
    )


def value_scatter(recording: Recording, found: Values, completed: bool) -> Chart:
    """Estimated values over returns."""
    rng = np.random.default_rng(0)
    chosen = np.arange(len(found.estimated))
    if len(chosen) > MAX_POINTS:
        chosen = np.sort(rng.choice(chosen, MAX_POINTS, replace=False))
    obtained = (found.completed if completed else found.obtained)[chosen]
    estimated, tail = found.estimated[chosen], found.tail[chosen]
    figure = new_figure("discounted return that followed", "critics' estimate", legend={"itemsizing": "constant"})
    for option in range(recording.num_options):
        here = recording.option[chosen] == option
        if not here.any():
            continue
        name = f"option {option}" if recording.num_options > 1 else "steps"
        figure.add_scatter(
            x=numbers(obtained[here]),
            y=numbers(estimated[here]),
            mode="markers",
            name=name,
            marker={"size": 6, "color": faded(option_color(option), 0.65)},
            customdata=np.stack([recording.step[chosen][here], 100 * tail[here]], 1).astype(np.float32),
            hovertemplate="step %{customdata[0]}: estimate %{y:.3g}, return %{x:.3g}; "
            "%{customdata[1]:.0f} % of the weight "
            "lies behind the cut<extra>" + name + "</extra>",
        )
    low, high = float(min(obtained.min(), estimated.min())), float(max(obtained.max(), estimated.max()))
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        name="equal",
        line={"color": LINE_COLORS[3], "dash": "dot", "width": 1.5},
        hoverinfo="skip",
    )
    error = float(np.mean(estimated - obtained))
    cut = bool((found.tail > 0).any())
    how = "On the dotted line estimates are right; above it the critics promise too much, below too little."
    if cut and completed:
        how += (
            " The time limit has cut the episodes: what would have come after is the critics' own estimate at "
            "the last step, so that "
            "steps near the end agree by construction."
        )
    elif cut:
        how += (
            " The time limit has cut the episodes, and with them these returns: late steps have a return of few "
            "rewards, and lie off "
            "the line for that reason alone."
        )
    title = "Values against returns" + (", completed" if cut and completed else ", as obtained" if cut else "")
    return Chart(
        title,
        how,
        f"{title}: estimates are {number(abs(error))} too {'high' if error > 0 else 'low'} on average.",
        figure,
        380,
    )


def value_error(moments: Sequence[tuple[float, Values]]) -> Chart | None:
    """Mean error of the estimates at each recorded moment."""
    if len(moments) < 2:
        return None
    steps, bias, size = [], [], []
    for env_steps, found in moments:
        # Near the cut the completed return is mostly the estimate itself.
        used = found.tail <= 0.5
        difference = (found.estimated - found.completed)[used if used.any() else slice(None)]
        steps.append(env_steps)
        bias.append(float(difference.mean()))
        size.append(float(np.abs(difference).mean()))
    figure = new_figure("environment steps", "return")
    figure.add_scatter(
        x=numbers(steps),
        y=numbers(bias),
        name="mean error",
        mode="lines+markers",
        line={"color": LINE_COLORS[0], "width": 2},
    )
    figure.add_scatter(
        x=numbers(steps),
        y=numbers(size),
        name="mean size of the error",
        mode="lines+markers",
        line={"color": LINE_COLORS[1], "width": 2, "dash": "dash"},
    )
    figure.add_hline(y=0, line={"color": LINE_COLORS[3], "width": 1, "dash": "dot"})
    return Chart(
        "Error of the values over the training",
        "Estimate less return: above zero the critics promise too much; the dashed line counts both signs alike "
        "and should fall. "
        "Steps of which more than half of the weight lies behind a time limit are left out where there are others.",
        f"Mean error {number(bias[0])} at first, {number(bias[-1])} at last.",
        figure,
        280,
    )
