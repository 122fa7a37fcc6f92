"""An exported file against the agent that it was made of, played in a process that has nothing of this package.

Shapes: T calls, N lanes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from claw_lightning.errors import ClawError
from claw_lightning.export import alone
from claw_lightning.export.graph import PolicyGraph
from claw_lightning.module import OptionCritic
from claw_lightning.rollout.acting import OptionAgent

#: Largest difference of an action, in ranges of that action; of probabilities as it is.
LIMIT = 1e-5
NUM_STEPS, NUM_LANES = 40, 40
#: Observations on which at least they are compared, and the share of first steps among them.
LEAST, FIRST_SHARE = 1_000, 0.05
#: Decisions that are nearer to a tie than this may go either way by rounding.
TIE = 1e-5
SEED = 20_000
SECONDS = 300.0


class ExportError(ClawError):
    """The exported file does not do what the agent does, or cannot be played; one line."""


@dataclass(frozen=True)
class Comparison:
    """How near a file came.

    Attributes:
        observations: on how many it was compared.
        ties: observations that were left out: a decision stood within rounding of a tie there, or earlier in the
            episode.
        difference: largest difference of an action, in ranges of that action (0 for discrete ones, which are equal).
        probabilities: largest difference of the options' probabilities and terminations.
        switches: options that ended within episodes.
    """

    observations: int
    ties: int
    difference: float
    probabilities: float
    switches: int


def draw_inputs(graph: PolicyGraph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs of T calls, [T, N, ...]; of those that come from the call before, what the first one is given, [N].

    Observations are drawn from the normaliser's mean and standard deviation, every fourth lane from four times the
    latter, so that normalised ones are clipped as well; pixels, random numbers and first steps evenly. All but a few
    lanes begin amid an episode, with any option and age, so that options run which the policy would not choose.
    """
    lead = (NUM_STEPS, NUM_LANES)
    found: dict[str, np.ndarray] = {}
    if graph.obs_size:
        normalizer = graph.policy.normalizer
        spread = np.where(np.arange(NUM_LANES) % 4 == 3, 4.0, 1.0)[:, None]
        noise = spread * rng.standard_normal((*lead, graph.obs_size))
        found["obs"] = (normalizer.mean.numpy() + normalizer.std.numpy() * noise).astype(np.float32)
    if graph.image_shape is not None:
        found["image"] = rng.integers(0, 256, (*lead, *graph.image_shape), dtype=np.uint8)
    if graph.has_options:
        found["first"] = rng.random(lead) < FIRST_SHARE
        found["first"][0, : NUM_LANES // 4] = True
        found["option"] = rng.integers(0, graph.num_options, NUM_LANES)
    if graph.has_steps:
        found["steps"] = rng.integers(0, max(graph.min_duration, graph.max_duration) + 1, NUM_LANES)
    if graph.has_uniform:
        found["uniform"] = rng.random((*lead, 2)).astype(np.float32)
    return found


class _Given:
    """In place of an agent's generator: hands out the random numbers that the file is given."""

    def __init__(self, graph: PolicyGraph) -> None:
        # The order in which OptionAgent.act draws: terminations [N], then choices [N, 1].
        self.columns = ([] if graph.greedy else [0]) + ([] if graph.greedy_choice else [1])
        self.left: list[np.ndarray] = []

    def set(self, uniform: np.ndarray) -> None:
        self.left = [uniform[:, column] for column in self.columns]

    def random(self, shape: Any) -> np.ndarray:
        return self.left.pop(0).reshape(shape)


def play_agent(agent: OptionAgent, graph: PolicyGraph, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same calls by the agent itself: what :class:`PolicyGraph` gives, [T, N, ...].

    Besides ``switched`` and ``tie``, both [T, N] bool: whether a decision was within rounding of another one.
    """
    given = _Given(graph)
    outputs: list[dict[str, np.ndarray]] = []
    running = inputs.get("option", np.zeros(agent.num_lanes, np.int64)).copy()
    ages = inputs.get("steps", np.zeros(agent.num_lanes, np.int64))
    start = {"option": torch.from_numpy(running.astype(np.int32)), "age": torch.from_numpy(ages.astype(np.int32))}
    agent.load_state_dict({**agent.state_dict(), **start})
    if graph.has_uniform:
        agent._rng = given  # type: ignore[assignment]
    for t in range(NUM_STEPS):
        call = {name: value[t] for name, value in inputs.items() if name not in alone.KEPT}
        obs = call.get("obs", np.zeros((agent.num_lanes, 0), np.float32))
        first = call.get("first", np.zeros(agent.num_lanes, bool))
        if graph.has_uniform:
            given.set(call["uniform"])
        decision = agent.act(obs, first, call.get("image"))
        found = {"action": _scaled(graph, decision.action), "switched": decision.switched & ~first}
        margins = [np.full(agent.num_lanes, np.inf)]
        x = _seen(agent, obs, call.get("image"))
        with torch.no_grad():
            if graph.has_options:
                running[first] = 0
                probs, beta = agent.policy.option_probs(x).numpy(), agent.policy.beta(x).numpy()
                beta = beta[np.arange(agent.num_lanes), running]
                values = agent.policy.option_values(x).numpy()
                margins += _option_margins(agent, graph, probs, beta, values, running, first, call.get("uniform"))
                running = decision.option.astype(np.int64)
                found.update(next_option=running.copy(), option_probs=probs, termination=beta)
            if graph.has_steps:
                found["next_steps"] = decision.age.astype(np.int64)
            if graph.num_actions > 0:
                margins.append(_gap(graph.policy.actor(x, torch.from_numpy(running)).numpy()))
        found["tie"] = np.min(margins, axis=0) < TIE
        outputs.append(found)
    return {name: np.stack([each[name] for each in outputs]) for name in outputs[0]}


def _seen(agent: OptionAgent, obs: np.ndarray, image: np.ndarray | None) -> torch.Tensor:
    with torch.no_grad():
        x = agent.policy.normalizer(torch.from_numpy(obs))
        return x if image is None else agent.policy.perceive(x, torch.from_numpy(image))


def _scaled(graph: PolicyGraph, action: np.ndarray) -> np.ndarray:
    """Actions [N, A] in [-1, 1] in the simulator's units, as adapters take them, or numbers [N] of discrete ones."""
    if graph.num_actions > 0:
        return action[:, 0].astype(np.int64)
    return graph.centre.double().numpy() + graph.half_range.double().numpy() * action


def _gap(scores: np.ndarray) -> np.ndarray:
    """How far the largest is before the next, [N, M] -> [N], in sizes of the largest."""
    ordered = np.sort(scores, axis=1)
    if scores.shape[1] < 2:
        return np.full(len(scores), np.inf)
    return (ordered[:, -1] - ordered[:, -2]) / np.maximum(1.0, np.abs(scores).max(axis=1))


def _option_margins(
    agent: OptionAgent,
    graph: PolicyGraph,
    probs: np.ndarray,
    beta: np.ndarray,
    values: np.ndarray,
    running: np.ndarray,
    first: np.ndarray,
    uniform: np.ndarray | None,
) -> list[np.ndarray]:
    """How near the termination and the choice were to going the other way; infinite where they did not matter."""
    found = [np.abs(beta - (0.5 if graph.greedy or uniform is None else uniform[:, 0]))]
    if graph.interruption is not None:
        kept = values[np.arange(len(values)), running] + float(agent.policy.switch_cost) + graph.interruption
        found.append(np.abs(kept - (probs * values).sum(axis=1)) / np.maximum(1.0, np.abs(values).max(axis=1)))
    found = [np.where(first, np.inf, each) for each in found]
    if graph.greedy_choice:
        fixed = isinstance(agent.policy.option_selection, int)
        return [*found, np.full(len(probs), np.inf) if fixed else _gap(probs)]
    assert uniform is not None
    return [*found, np.abs(probs.cumsum(axis=1)[:, :-1] - uniform[:, 1:]).min(axis=1)]


def play_file(path: Path, inputs: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Outputs and metadata of a file, played by ``alone.py`` in an interpreter that cannot import this package.

    Raises:
        ExportError: it cannot be played, or something of the training side was imported all the same.
    """
    with tempfile.TemporaryDirectory(prefix="export_check_") as folder:
        given, answer = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(given, **inputs)  # type: ignore[arg-type]
        command = [
            sys.executable,
            "-I",
            "-S",
            alone.__file__,
            str(path.absolute()),
            str(given),
            str(answer),
            *_libraries(path),
        ]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise ExportError(f"playing the file took more than {SECONDS:.0f} seconds") from error
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["no message"]
            raise ExportError(f"the file cannot be played without this package ({said[-1]})")
        report = json.loads(done.stdout.splitlines()[-1])
        if report["refused"]:
            raise ExportError(f"playing the file imported {report['refused'][0]}")
        with np.load(answer) as content:
            return {name: content[name] for name in content.files}, report["metadata"]


def _libraries(path: Path) -> list[str]:
    """Folders in which the interpreter finds numpy and what plays the file."""
    found = []
    for name in ("numpy", "torch" if path.suffix == ".pt2" else "onnxruntime"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(found))


def compare(path: Path, graph: PolicyGraph, module: OptionCritic, metadata: dict[str, Any]) -> Comparison:
    """Play a file and the agent of a module on the same inputs.

    Raises:
        ExportError: they differ by more than :data:`LIMIT` or in an option, too little could be compared, or the
            file says something else of itself.
    """
    inputs = draw_inputs(graph, np.random.default_rng(SEED))
    agent = module.agent(num_lanes=NUM_LANES, student=bool(metadata["student"]))
    theirs, told = play_file(path, inputs)
    ours = play_agent(agent, graph, inputs)
    if told != metadata:
        raise ExportError("its metadata is not what was written")
    judged = _judged(ours["tie"], inputs.get("first"))
    alone_as_well = judged[:, :1]
    width = graph.half_range.double().numpy() * 2
    difference = probabilities = 0.0
    for name in metadata["outputs"]:
        for other, rows, lanes in (
            (theirs[name], judged, slice(None)),
            (theirs[f"alone_{name}"], alone_as_well, slice(1)),
        ):
            mine = ours[name][:, lanes]
            if mine.shape != other.shape:
                raise ExportError(f"{name} has the shape {other.shape[1:]}, not {mine.shape[1:]}")
            if not np.issubdtype(mine.dtype, np.floating):
                if not np.array_equal(mine[rows], other[rows]):
                    raise ExportError(f"{name} is not the agent's at {int((mine != other)[rows].sum())} places")
                continue
            error = np.abs(mine.astype(np.float64) - other)
            if name == "action":
                error = error / np.where(width > 0, width, 1.0)
            largest = float(error[rows].max(initial=0.0))
            if not largest <= LIMIT:  # NaN is none either
                raise ExportError(f"{name} differs from the agent's by {largest:.3g}, more than {LIMIT:g}")
            if name == "action":
                difference = max(difference, largest)
            else:
                probabilities = max(probabilities, largest)
    if judged.sum() < LEAST:
        raise ExportError(
            f"only {int(judged.sum()):,} of {judged.size:,} observations could be compared, at the others the "
            "policy is undecided between actions or options"
        )
    return Comparison(
        int(judged.sum()), int((~judged).sum()), difference, probabilities, int(ours["switched"][judged].sum())
    )


def _judged(tie: np.ndarray, first: np.ndarray | None) -> np.ndarray:
    """Rows [T, N] that can be compared: not those of a tie, nor, with options, the rest of the episode after one."""
    if first is None:
        return ~tie
    judged, lost = np.zeros_like(tie), np.zeros(tie.shape[1], bool)
    for t in range(len(tie)):
        lost = (lost & ~first[t]) | tie[t]
        judged[t] = ~lost
    return judged
