"""The page: figures of all groups, and the template that is filled with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from reporting import option_charts, training_charts
from reporting.aggregate import Estimate, estimate, probability_of_improvement, value_at
from reporting.charts import LEFT, Chart, line_style, number, option_color, text_color
from reporting.detail import describe
from reporting.runs import Group, differences

TEMPLATE = Path(__file__).with_name("template")
#: Rows of the latest worker events that the table shows.
MOST_EVENTS = 200


def headline(group: Group) -> dict[str, Any]:
    """The card of a group."""
    runs = group.runs
    return {
        "group": group,
        "tasks": ", ".join(dict.fromkeys(run.task for run in runs)),
        "num_options": runs[0].num_options,
        "seeds": ", ".join(run.seed for run in runs),
        "steps": _span([run.env_steps for run in runs]),
        "minutes": _span([run.minutes for run in runs]),
        "going": sum(run.is_going for run in runs),
        "return": estimate([run.curves["val/return"].last for run in runs if "val/return" in run.curves]),
        "success": estimate([run.curves["val/success"].last for run in runs if "val/success" in run.curves]),
        "training_return": estimate(
            [run.curves["rollout/return"].last for run in runs if "rollout/return" in run.curves]
        ),
    }


def _span(found: Sequence[float]) -> str:
    low, high = min(found), max(found)
    return number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"


def interval(found: Estimate) -> str:
    """What stands beside an estimate: its interval, or why it has none."""
    if len(found.values) == 1:
        return "one run, no interval"
    ends = f"{number(found.low)} to {number(found.high)}"
    return ends + (", 95 % interval" if found.is_interval else ", both runs")


def with_code(text: str) -> Markup:
    """What stands between backticks as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in enumerate(parts)
    )


def compare(groups: Sequence[Group]) -> tuple[list[Chart], str]:
    """Charts of all groups' evaluations, and at which point of the training they were taken."""
    charts: list[Chart] = []
    runs = [run for group in groups for run in group.runs]
    lasts = [run.curves["val/return"].steps[-1] for run in runs if "val/return" in run.curves]
    if len(groups) < 2 or not lasts:
        return [], ""
    steps = min(lasts)
    how = (
        "The dot is the interquartile mean over the runs, the bar its 95 % bootstrap interval (of fewer than three "
        "runs: their least and largest); bars that overlap much do not tell the groups apart."
    )
    for name, words, unit in (
        ("val/return", "Return", "return per episode"),
        ("val/success", "Success", "share of episodes"),
    ):
        figures = {group.letter: [value_at(run, name, steps) for run in group.runs] for group in groups}
        rows = {group.letter: found for group in groups if (found := estimate(figures[group.letter])) is not None}
        if len(rows) < 2:
            continue
        limits = (-0.03, 1.03) if words == "Success" else None
        charts.append(training_charts.estimates(rows, f"{words} in evaluation", unit, how, limits))
        pairs = {}
        for i, first in enumerate(groups):
            for second in groups[i + 1 :]:
                found = probability_of_improvement(figures[first.letter], figures[second.letter])
                if found is not None:
                    pairs[f"{first.letter} > {second.letter}"] = found
        if len(pairs) <= 15:
            charts.append(
                training_charts.estimates(
                    pairs,
                    f"Probability of improvement: {words.lower()}",
                    "probability",
                    "How likely a run of the first group beats one of the second, drawn at random; 0.5 is no "
                    "difference.",
                    (-0.03, 1.03),
                    is_chance=True,
                )
            )
    text = (
        f"Every run as its last evaluation up to {steps:,.0f} environment steps found it (or its first one, where that "
        "came later): so far all of them have got"
    )
    tasks = {run.task for run in runs}
    if len(tasks) > 1:
        text += "; the groups are of different tasks, whose returns cannot be compared"
    return charts, text + "."


def render(groups: Sequence[Group], moments: int = 5) -> str:
    """The whole page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=jinja2.select_autoescape(("html", "j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "with_code": with_code,
        "option_color": option_color,
        "text_color": text_color,
        "interval": interval,
        "number": number,
        "line_color": lambda index: line_style(index)["color"],
    }
    curves = {
        axis: [
            chart for kind in ("return", "success") if (chart := training_charts.learning_curves(groups, kind, axis))
        ]
        for axis in ("steps", "minutes")
    }
    comparison, compared_at = compare(groups)
    details = [describe(group, moments) for group in groups]
    return environment.get_template("page.html.j2").render(
        groups=groups,
        headlines=[headline(group) for group in groups],
        curves=curves,
        comparison=comparison,
        compared_at=compared_at,
        details=details,
        differences=differences(groups),
        # First what there is most to see of.
        chosen=max(range(len(details)), key=lambda i: (bool(details[i].cards), bool(details[i].moments), -i)),
        has_options=any(run.num_options > 1 for group in groups for run in group.runs),
        most_events=MOST_EVENTS,
        strip_left=LEFT,
        strip_right=option_charts.STRIP_RIGHT,
        written=time.strftime("%Y-%m-%d %H:%M"),
        css=(TEMPLATE / "page.css").read_text(),
        script=(TEMPLATE / "page.js").read_text(),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )
