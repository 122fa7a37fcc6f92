"""Whole runs with simulators that misbehave: each is made harmless, or ends in one line that names what was wrong."""

import re

import numpy as np
import pytest

from claw_lightning.data import EnvConfig
from claw_lightning.errors import ClawError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.rollout.envs.diagnostic import CodedEnv, check_rows
from tests.builders import collector_of
from tests.runs import fit_lockstep

#: A user's own file in the working directory. ``fault`` says what goes wrong, from the vector step ``at`` on.
SIMULATOR = """
import json, os, sys
import numpy as np
from claw_lightning.rollout.envs.diagnostic import CodedEnv


class Sim(CodedEnv):
    def __init__(self, task="coded", num_envs=1, seed=0, fault="", at=0, first_life=""):
        if fault == "quit_at_start":
            print("no license", flush=True)
            quit()
        super().__init__(task, num_envs, seed, min_length=2, max_length=9, mark_process=False,
                         autoreset="same_step" if fault.startswith("final") else "next_step")
        self.fault, self.at, self.count = fault, at, 0
        # Where the file exists, this process takes the place of one that has failed, and does better.
        if first_life:
            if os.path.exists(first_life):
                self.fault = ""
            elif num_envs > 1:
                open(first_life, "w").close()

    def reset(self, seed=None):
        obs = super().reset(seed)
        if self.fault == "reset_none":
            return None
        if self.fault == "reset_nan":
            obs[0] = np.nan
        if self.fault == "reset_shape":
            return obs[0]
        return obs

    def step(self, action):
        self.count += 1
        result = super().step(action)
        if self.count <= self.at:
            return result
        fault, n = self.fault, self.num_envs
        if fault == "print":
            os.write(1, b'{"kind": "ready"}\\n{"kind": "error", "message": "printed"}\\n\\x00\\xff\\xfe not json')
            os.write(2, b'{"kind": "episodes", "episodes": [[1e9, 1, 1.0]]}\\n')
        elif fault == "quit":
            quit()
        elif fault == "none":
            return None
        elif fault == "clip_in_place":
            np.clip(action, -0.01, 0.01, out=action)
        wrong = {
            "obs_float64": lambda: {"obs": result.obs.astype(np.float64)},
            "obs_int": lambda: {"obs": result.obs.astype(np.int64)},
            "obs_object": lambda: {"obs": result.obs.astype(object)},
            "obs_list": lambda: {"obs": result.obs.tolist()},
            "obs_none": lambda: {"obs": None},
            "obs_shape": lambda: {"obs": result.obs[:, :-1]},
            "obs_lanes": lambda: {"obs": result.obs[:1]},
            "reward_int": lambda: {"reward": np.ones(n, int)},
            "reward_scalar": lambda: {"reward": np.float32(1.0)},
            "reward_column": lambda: {"reward": result.reward[:, None]},
            "reward_none": lambda: {"reward": None},
            "terminated_scalar": lambda: {"terminated": False},
            "terminated_int": lambda: {"terminated": result.terminated.astype(np.int64)},
            "terminated_shape": lambda: {"terminated": result.terminated[:1]},
            "truncated_float": lambda: {"truncated": result.truncated.astype(np.float32)},
            "border_none": lambda: {"is_border": None},
            "final_shape": lambda: {"final_obs": result.final_obs[:, :-1]},
            "final_float64": lambda: {"final_obs": result.final_obs.astype(np.float64)},
            "final_none": lambda: {"final_obs": None},
            "final_flag": lambda: {"has_final_obs": result.has_final_obs.astype(np.int64)},
            "success_length": lambda: {"info": {"success": np.ones(n + 1, np.float32)}},
            "success_text": lambda: {"info": {"success": np.array(["yes"] * n)}},
            "info_none": lambda: {"info": None},
        }
        return result._replace(**wrong[fault]()) if fault in wrong else result
"""


class Rows(UpdateCallback):
    """Counts of check_rows over all batches."""

    def __init__(self):
        self.counts, self.quarantined, self.restarts = {}, 0, 0

    def on_batch_sampled(self, trainer, module, batch):
        arrays = (batch.obs, batch.next_obs, batch.reward, batch.terminated, batch.truncated, batch.action)
        for name, count in check_rows(*(array.numpy() for array in arrays)).items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.quarantined = trainer.datamodule.quarantined
        self.restarts = 0 if trainer.datamodule.pool is None else trainer.datamodule.pool.restarts

    @property
    def broken(self):
        return {name: n for name, n in self.counts.items() if n and name not in ("rows", "without_final")}


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Runs the file's simulator with a fault; returns what was learned from."""
    (tmp_path / "my_hand.py").write_text(SIMULATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def play(fault, mode="overlapped", data=None, **init_args):
        rows = Rows()
        settings = {
            "env": EnvConfig("my_hand.Sim", {"fault": fault, **init_args}), "mode": mode, "envs_per_worker": 4,
            **(data or {}),
        }  # fmt: skip
        fit_lockstep(tmp_path, callbacks=[rows], data=settings, limit_val_batches=0)
        assert rows.counts["rows"] > 0
        return rows

    return play


# -- harmless ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_simulator_prints_is_no_message(play, tmp_path):
    rows = play("print")
    assert rows.broken == {} and rows.restarts == 0
    log = (tmp_path / "logs" / "worker_0.log").read_bytes()
    assert b"\x00\xff\xfe not json" in log and b"printed" in log


@pytest.mark.parametrize("mode", ["lockstep", pytest.param("overlapped", marks=pytest.mark.slow)])
def test_numbers_that_are_none_at_a_reset_are_quarantined(play, mode):
    rows = play("reset_nan", mode)
    assert rows.broken == {} and rows.quarantined == 1


def test_a_simulator_that_changes_the_actions_it_got_changes_no_rows(play):
    assert play("clip_in_place", "lockstep").broken == {}


@pytest.mark.slow
def test_a_process_that_breaks_off_once_is_replaced(play, tmp_path):
    rows = play("quit", at=20, first_life=str(tmp_path / "lived"))
    assert rows.broken == {} and rows.restarts == 1


class Reusing(CodedEnv):
    """Returns the same arrays at every step, as simulators do that write into buffers of their own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.buffers = {}

    def _own(self, name, array):
        if array is None:
            return None
        buffer = self.buffers.setdefault(name, np.empty_like(array))
        buffer[:] = array
        return buffer

    def reset(self, seed=None):
        return self._own("obs", super().reset(seed))

    def step(self, action):
        result = super().step(action)
        info = {name: self._own(name, value) for name, value in result.info.items()}
        arrays = {name: self._own(name, value) for name, value in result._asdict().items() if name != "info"}
        return result._replace(info=info, **arrays)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_simulator_that_reuses_its_buffers_gives_the_same_rows(autoreset):
    found = []
    for cls in (CodedEnv, Reusing):
        collector, ring, _ = collector_of(cls(num_envs=3, max_length=5, autoreset=autoreset))
        for _ in range(40):
            collector.step()
        collector.reset()
        collector.step()
        view = ring.layout.view
        found.append([view(ring.rows[:41], name).copy() for name in ("obs", "reward", "flags")] + [ring.finals.copy()])
    for kept, reused in zip(*found):
        np.testing.assert_array_equal(kept, reused)


# -- one line ---------------------------------------------------------------------------------------------------------

#: What the line must name: the array that was wrong, and how.
LINES = {
    "reset_none": "observation.*NoneType",
    "reset_shape": r"observation of shape \(16,\)",
    "obs_float64": "observation.*float64",
    "obs_int": "observation.*int64",
    "obs_object": "observation.*object",
    "obs_list": "observation.*list",
    "obs_none": "observation.*NoneType",
    "obs_shape": r"observation of shape \(4, 15\)",
    "obs_lanes": r"observation of shape \(1, 16\)",
    "reward_int": "reward.*int64",
    "reward_scalar": "reward.*float32",
    "reward_column": r"reward of shape \(4, 1\)",
    "reward_none": "reward.*NoneType",
    "terminated_scalar": "terminated.*bool",
    "terminated_int": "terminated.*int64",
    "terminated_shape": r"terminated of shape \(1,\)",
    "truncated_float": "truncated.*float32",
    "border_none": "is_border.*NoneType",
    "final_shape": r"final_obs of shape \(4, 15\)",
    "final_float64": "final_obs.*float64",
    "final_none": "final_obs.*NoneType",
    "final_flag": "has_final_obs.*int64",
    "success_length": r"success of shape \(5,\)",
    "success_text": "success",
    "info_none": "info.*NoneType",
    "none": "NoneType",
}


@pytest.mark.parametrize("fault", LINES)
def test_what_breaks_the_contract_is_named(play, fault):
    with pytest.raises(ClawError, match=LINES[fault]) as error:
        play(fault, "lockstep")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("fault, at", [("obs_float64", 0), ("reward_column", 30)])
def test_the_line_of_a_worker_names_its_log(play, fault, at):
    """Also one that worked for a while: replaced once, and then given up."""
    with pytest.raises(ClawError, match=LINES[fault]) as error:
        play(fault, at=at, data={"restart_budget": 1})
    line = str(error.value)
    assert "\n" not in line and re.search(r"log: .*worker_0\.log", line) and line.startswith("worker 0")


@pytest.mark.slow
@pytest.mark.parametrize("fault, at, log", [("quit_at_start", 0, "describe"), ("quit", 30, "worker_0")])
def test_a_simulator_that_quits_is_named_with_its_log(play, fault, at, log):
    with pytest.raises(ClawError, match=rf"SystemExit.*log: .*{log}\.log") as error:
        play(fault, at=at, data={"restart_budget": 0})
    assert "\n" not in str(error.value)
