"""Shows that the tests would notice the classical faults of an option-critic.

    python scripts/mutation_check.py
    python scripts/mutation_check.py --only cost-dropped-in-loss --list

Each fault below is a small edit of the source. The package is copied to a temporary folder (the checkout is never
touched), one fault is put in at a time, and the tests named beside it must fail there. First they must all pass on the
unchanged copy: a test that fails anyway shows nothing.

Exit status: 0 every fault was noticed, 1 one was not, or its text is not found exactly once, or the tests fail without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What the tests need of the checkout.
COPIED = ("claw_lightning", "callbacks", "conf", "scripts", "tests", "pyproject.toml", "README.md")
SECONDS = 1800.0  # a hung test; generous, since other jobs may have the cores
#: pytest's exit status where tests ran and some failed; others mean that nothing was shown.
TESTS_FAILED = 1


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: for the command line and the report.
        file: below the root; with wildcards where the text may move between files: it must be in all of them once.
        old: text that is there exactly once; several lines where one does not tell it from others.
        new: what the fault has in its place.
        tests: words for pytest: files, node ids, or ``-k`` and an expression.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


#: Of the update schedule, whose parts may move between files.
UPDATES = "claw_lightning/updates/*.py"
LOSSES, VALUES = "claw_lightning/losses.py", "claw_lightning/values.py"
RETURNS, BATCH = "claw_lightning/returns.py", "claw_lightning/replay/batch.py"
COLLECTOR, ENVS = "claw_lightning/rollout/collector.py", "claw_lightning/rollout/envs"
ISAAC, T_ISAAC = f"{ENVS}/isaacgym.py", ("tests/rollout/envs/test_isaacgym.py",)
NORMALIZER, TENSORS = "claw_lightning/rollout/normalizer.py", f"{ENVS}/tensor_env.py"
T_CONFORMANCE, T_STATES = ("tests/rollout/envs/test_conformance.py",), ("tests/replay/test_states.py",)
T_LOSSES, T_FAULTS, T_RETURNS = ("tests/test_losses.py",), ("tests/test_faults.py",), ("tests/test_returns.py",)

MUTATIONS = (
    # (a) the sign of the termination loss
    Mutation(
        "termination-sign",
        LOSSES,
        "return weighted_mean(beta * push, weight)",
        "return -weighted_mean(beta * push, weight)",
        T_LOSSES,
    ),
    Mutation(
        "termination-sign-in-update",
        UPDATES,
        "total = times(ends, termination_loss - h.termination_entropy * entropy)",
        "total = times(ends, -termination_loss - h.termination_entropy * entropy)",
        T_FAULTS,
    ),
    # (b) termination at the state left, in place of the one arrived in
    Mutation(
        "termination-at-s",
        UPDATES,
        "judged = torch.cat((option_rows(module, rows.next_judged), ",
        "judged = torch.cat((option_rows(module, rows.judged), ",
        T_FAULTS,
    ),
    Mutation(
        "termination-of-s",
        UPDATES,
        "option_rows(module, rows.first), option_rows(module, rows.next_obs)",
        "option_rows(module, rows.first), option_rows(module, rows.obs)",
        ("tests/updates/test_options.py",),
    ),
    # (c) V as the best option's value
    Mutation(
        "maximum-for-expectation",
        LOSSES,
        "return (option_probs * q).sum(dim=-1)",
        "return q.amax(dim=-1) + 0.0 * option_probs.sum(dim=-1)",
        T_LOSSES,
    ),
    # (d) ends of the task that do not count as such
    Mutation(
        "terminal-mask-dropped-in-target",
        LOSSES,
        "return torch.where(terminated, reward, reward + gamma * arrival)",
        "return reward + gamma * arrival",
        T_LOSSES,
    ),
    Mutation(
        "terminal-mask-dropped-in-termination",
        UPDATES,
        "arriving = arriving * (~option_rows(module, rows.terminated)).float().unsqueeze(1)",
        "arriving = arriving * 1.0",
        T_FAULTS,
    ),
    # (e) time limits that count as ends of the task
    Mutation(
        "truncation-is-terminal-in-batch",
        BATCH,
        '(self.field("flags") & TERMINATED) != 0',
        '(self.field("flags") & (TERMINATED | TRUNCATED)) != 0',
        ("tests/replay/test_batch.py", *T_FAULTS),
    ),
    Mutation(
        "truncation-is-terminal-in-collector",
        COLLECTOR,
        "(result.terminated, TERMINATED)",
        "(result.terminated | result.truncated, TERMINATED)",
        ("tests/rollout/test_collector.py",),
    ),
    Mutation(
        "truncation-is-terminal-in-envpool",
        f"{ENVS}/envpool_env.py",
        "terminated=terminated & ~is_border",
        "terminated=(terminated | truncated) & ~is_border",
        ("tests/rollout/envs/test_envpool_env.py",),
    ),
    Mutation(
        "truncation-is-terminal-in-gymnasium",
        f"{ENVS}/gymnasium_env.py",
        "terminated, truncated = np.array(terminated, dtype=bool), ",
        "terminated, truncated = np.logical_or(terminated, truncated), ",
        ("tests/rollout/envs/test_gymnasium_env.py",),
    ),
    # (f) returns of several steps: the wrong option, or the wrong place
    Mutation(
        "bootstrap-with-the-first-option",
        UPDATES,
        "arrival = arrival.gather(1, option.unsqueeze(1)).view(shape)",
        "arrival = arrival.gather(1, rows.option[:, :1].expand(shape).reshape(-1, 1)).view(shape)",
        T_FAULTS,
    ),
    Mutation(
        "switch-not-seen",
        UPDATES,
        "return torch.cat((rows.switched[:, 1:] & rows.valid[:, 1:], none), 1)",
        "return torch.cat((none, rows.switched[:, 1:] & rows.valid[:, 1:]), 1)",
        T_FAULTS,
    ),
    Mutation(
        "survivor-value-at-a-switch",
        RETURNS,
        "bootstrap = torch.where(inside & ended & ~by_cap, next_value - deliberation_cost, arrival)",
        "bootstrap = arrival",
        T_RETURNS,
    ),
    Mutation(
        "return-through-a-switch",
        RETURNS,
        "going_on = inside & ~(ended | by_cap)",
        "going_on = inside",
        T_RETURNS,
    ),
    Mutation(
        "cost-dropped-on-the-path",
        RETURNS,
        "following = torch.where(going_on[:, k], total - toll[:, k], bootstrap[:, k])",
        "following = torch.where(going_on[:, k], total, bootstrap[:, k])",
        T_RETURNS,
    ),
    Mutation(
        "cost-dropped-on-the-path-in-update",
        UPDATES,
        "ended=ended, by_cap=capped, deliberation_cost=cost,",
        "ended=ended, by_cap=capped, deliberation_cost=0.0,",
        T_FAULTS,
    ),
    Mutation(
        "terminal-mask-dropped-in-return",
        RETURNS,
        "total = torch.where(terminated[:, k], reward[:, k], reward[:, k] + gamma * following)",
        "total = reward[:, k] + gamma * following",
        T_RETURNS,
    ),
    # (g) the deliberation cost, forgotten or with the wrong sign
    Mutation(
        "cost-dropped-in-loss",
        LOSSES,
        "push = advantage(q, option_probs) + deliberation_cost",
        "push = advantage(q, option_probs)",
        T_LOSSES,
    ),
    Mutation(
        "cost-sign-in-loss",
        LOSSES,
        "push = advantage(q, option_probs) + deliberation_cost",
        "push = advantage(q, option_probs) - deliberation_cost",
        T_LOSSES,
    ),
    Mutation(
        "cost-dropped-in-arrival",
        LOSSES,
        "return (1 - beta) * q + beta * (value - deliberation_cost)",
        "return (1 - beta) * q + beta * value",
        T_LOSSES,
    ),
    Mutation(
        "cost-sign-in-arrival",
        LOSSES,
        "return (1 - beta) * q + beta * (value - deliberation_cost)",
        "return (1 - beta) * q + beta * (value + deliberation_cost)",
        T_LOSSES,
    ),
    Mutation(
        "cost-dropped-in-update",
        UPDATES,
        "cost = policy.switch_cost / scale",
        "cost = 0.0 * policy.switch_cost / scale",
        T_FAULTS,
    ),
    Mutation(
        "cost-dropped-in-sampled-arrival",
        VALUES,
        ".amin(0) + bonus - self.cost * ended",
        ".amin(0) + bonus",
        T_FAULTS,
    ),
    Mutation(
        "cost-sign-in-sampled-arrival",
        VALUES,
        ".amin(0) + bonus - self.cost * ended",
        ".amin(0) + bonus + self.cost * ended",
        T_FAULTS,
    ),
    # (h) the option policy at first steps, where nothing arrives and one option is chosen for certain
    Mutation(
        "first-steps-do-not-choose",
        UPDATES,
        "opens, next_obs = option_rows(module, rows.first), ",
        "opens, next_obs = option_rows(module, rows.first) & False, ",
        T_FAULTS,
    ),
    Mutation(
        "every-step-chooses",
        UPDATES,
        "opens, next_obs = option_rows(module, rows.first), ",
        "opens, next_obs = option_rows(module, rows.first) | True, ",
        T_FAULTS,
    ),
    # (i) Isaac Gym: borders, time limits, buffers that are written again
    Mutation(
        "truncation-is-terminal-in-isaacgym",
        ISAAC,
        '"terminated": ended & ~time_out & ~border,',
        '"terminated": ended & ~border,',
        T_ISAAC,
    ),
    Mutation(
        "border-is-no-border-in-isaacgym",
        ISAAC,
        '"is_border": border,',
        '"is_border": border & False,',
        (*T_ISAAC, *T_CONFORMANCE),
    ),
    Mutation(
        "reward-crosses-the-border-in-isaacgym",
        ISAAC,
        "(reward * self._reward_scale).masked_fill(border, 0.0)",
        "reward * self._reward_scale",
        T_ISAAC,
    ),
    Mutation(
        "one-buffer-takes-all-turns",
        "claw_lightning/rollout/device.py",
        "self._turn = 1 - self._turn",
        "self._turn = 0",
        T_CONFORMANCE,
    ),
    # (j) rows written in one pass
    Mutation(
        "last-words-not-stamped",
        "claw_lightning/rollout/stamp.py",
        "rows[:, last:] = self._words[:, last - self._first :]",
        "pass",
        ("tests/rollout/test_stamp.py",),
    ),
    # (k) privileged states
    Mutation(
        "last-states-are-those-of-the-next-episode",
        TENSORS,
        "final_states=None if finals is None else self._states_of(finals),",
        "final_states=None if finals is None else self._states_of(host),",
        T_CONFORMANCE,
    ),
    Mutation(
        "next-states-are-observations",
        "claw_lightning/replay/memory.py",
        "next_states=next_obs[..., self.layout.obs_size :] if",
        "next_states=next_obs[..., : self.layout.states_size] if",
        T_STATES,
    ),
    # (l) what several ranks have seen together
    Mutation(
        "distance-of-the-means-dropped",
        NORMALIZER,
        "squares = squares + part_squares + np.square(delta) * (count * n / total)",
        "squares = squares + part_squares",
        ("tests/test_ranks.py::test_merged_moments_are_those_of_all_observations",),
    ),
    # TO EXTEND HERE as updates/ settles: retrace (trace across a switch), policy_gradient.py, distributional arrival,
    # the all-options critic (update_critic has a branch with a target of its own for it).
)


def misfits(mutations: Sequence[Mutation], root: Path = ROOT) -> list[str]:
    """One line for each mutation that cannot be applied: its text is not there exactly once, or its tests are gone."""
    found = []
    for mutation in mutations:
        count = sum(path.read_text().count(mutation.old) for path in root.glob(mutation.file))
        if count != 1:
            found.append(f"{mutation.name}: its text is {count} times in {mutation.file}, not once")
        for word in mutation.tests:
            if word.startswith("tests/") and not (root / word.partition("::")[0]).is_file():
                found.append(f"{mutation.name}: no {word}")
    return found


def copy_package(target: Path, root: Path = ROOT) -> None:
    """What the tests need, without what running left there."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy2(source, target / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status of pytest on a copy, and its last telling line."""
    # The copy comes before the installed (editable) package; no byte code, since edits may share a time stamp.
    env = dict(os.environ, PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--durations=0",
               "--durations-min=1000", "-m", "not slow", *tests]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    telling = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (telling or lines)[-1]


def try_mutation(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    """Put one fault into the copy, run its tests, take it out again: whether they noticed, and how."""
    path, text = next((p, t) for p in folder.glob(mutation.file) if mutation.old in (t := p.read_text()))
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, line = run_tests(folder, mutation.tests)
    finally:
        path.write_text(text)
    if status == TESTS_FAILED:
        return True, line
    return False, "all tests pass" if status == 0 else f"tests did not run (pytest's status {status}): {line}"


def check(mutations: Sequence[Mutation], root: Path = ROOT) -> bool:
    """Try all; prints a line for each. Returns whether every fault was noticed."""
    wrong = misfits(mutations, root)
    for line in wrong:
        print(f"cannot apply  {line}")
    named = {line.partition(":")[0] for line in wrong}
    usable = [mutation for mutation in mutations if mutation.name not in named]
    with tempfile.TemporaryDirectory(prefix="claw-mutations-") as name:
        folder = Path(name)
        copy_package(folder, root)
        # Node ids and files; once each.
        tests = list(dict.fromkeys(word for mutation in usable for word in mutation.tests if word.startswith("tests/")))
        status, line = run_tests(folder, tests) if tests else (0, "")
        if status != 0:
            print(f"the tests do not pass on the unchanged copy, nothing can be shown: {line}")
            return False
        fine = not wrong
        for mutation in usable:
            started = time.monotonic()
            noticed, line = try_mutation(mutation, folder)
            fine &= noticed
            verdict = "noticed " if noticed else "SURVIVES"
            print(f"{verdict}  {mutation.name} ({time.monotonic() - started:.0f} s): {line}", flush=True)
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutation_check", description="Do the tests notice the classical faults?")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations (default: all)")
    parser.add_argument("--list", action="store_true", help="print names, and what cannot be applied; run nothing")
    args = parser.parse_args(arguments)
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in args.only or [] if name not in known]
    if unknown:
        print(f"mutation_check: error: no mutation {unknown[0]}; --list names them", file=sys.stderr)
        return 1
    chosen = [known[name] for name in args.only or known]
    if args.list:
        wrong = misfits(chosen)
        print("\n".join([f"{mutation.name}  {mutation.file}" for mutation in chosen] + wrong))
        return 1 if wrong else 0
    return 0 if check(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
