"""The benchmark: its command line, its way of measuring, the data, and whole tiny runs with stand-ins for packages."""

import gc
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayMemory
from claw_lightning.replay.samplers.prioritized import Prioritized
from claw_lightning.rollout.ring import BORDER, FIRST, SWITCHED, TRUNCATED, RowLayout
from tests.scripts.loading import load_script

measuring = load_script("measuring")
benchmark = load_script("benchmark")
TINY = ["--rows", "2048", "--small-rows", "2048", "--large-rows", "4096", "--batch", "16", "--updates", "2"]
QUICK = [*TINY, "--rounds", "2", "--seconds", "1e-9"]  # one call of each arm per round
PEER_ROWS = {
    "replay/sb3_to_gather": "stable-baselines3",
    "replay/tianshou_to_gather": "tianshou",
    "replay/torchrl_to_gather": "torchrl",
    "replay/prioritized_to_tianshou": "tianshou",
    "replay/prioritized_single_to_tianshou": "tianshou",
    "replay/segments_to_torchrl": "torchrl",
    "replay/segments_single_to_torchrl": "torchrl",
    "replay/segments_to_torchrl_uncached": "torchrl",
    "replay/hindsight_to_sb3": "stable-baselines3",
    "replay/bytes_to_sb3": "stable-baselines3",
    "replay/bytes_to_sb3_hindsight": "stable-baselines3",
}


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch):
    """What a run changes for the whole process is only noted here."""
    changed = []
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # a tenth of a second each in a process of this size
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda number: changed.append(("threads", number)))
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: changed.append("keep_freed_memory"))
    return changed


# -- the command line -------------------------------------------------------------------------------------------------


def test_defaults():
    args = benchmark.parse_args(["replay"])
    assert (args.rounds, args.seconds, args.clock, args.skip_peers, args.json) == (7, 1.0, "wall", False, None)
    assert (args.rows, args.large_rows, args.small_rows) == (200_000, 5_000_000, 50_000)
    assert (args.batch, args.updates) == (256, 8)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ([], "SUITE"),
        (["walking"], "walking"),
        (["replay", "--rounds", "0"], "--rounds"),
        (["replay", "--seconds", "0"], "--seconds"),
        (["replay", "--seconds", "nan"], "--seconds"),
        (["replay", "--clock", "sun"], "sun"),
        (["replay", "--rows", "100"], "--rows"),
        (["replay", "--small-rows", "100"], "--small-rows"),
        (["replay", "--large-rows", "50000"], "--large-rows"),
        (["replay", "--batch", "0"], "--batch"),
        (["replay", "--updates", "x"], "--updates"),
        (["replay", "--json", "no/such/folder/x.json"], "x.json"),
        (["replay", "--fast"], "--fast"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.parse_args(arguments)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("benchmark: error: ") and text.count("\n") == 1 and word in text


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt(), 130), (OSError("no room\nleft"), 1)])
def test_what_ends_a_run_early_is_told_in_one_line(error, status, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measure_suite", lambda args: (_ for _ in ()).throw(error))
    assert benchmark.main(["replay"]) == status
    text = capsys.readouterr().err
    assert text.startswith("benchmark: ") and text.count("\n") == 1


# -- measuring --------------------------------------------------------------------------------------------------------


class Work:
    """Arms that take seconds of a clock of their own."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def clock(self):
        return self.now

    def arm(self, name, rows, *seconds):
        """Takes the given seconds in turn, and the last for ever."""
        left = list(seconds)

        def call():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return rows

        return call


def test_arms_take_turns_and_the_first_round_does_not_count():
    work = Work()
    arms = {"a": work.arm("a", 10, 100.0, 1.0, 2.0), "b": work.arm("b", 6, 1.0)}
    rates = measuring.interleave(arms, 2, 0.5, work.clock)
    assert work.order == ["a", "b"] * 3
    assert rates == {"a": [10.0, 5.0], "b": [6.0, 6.0]}


def test_an_arm_is_called_until_its_time_is_over():
    work = Work()
    assert measuring.rate(work.arm("a", 3, 0.25), 1.0, work.clock) == 12.0
    assert len(work.order) == 4
    assert measuring.rate(work.arm("a", 3, 0.4), 1.0, work.clock) == pytest.approx(9 / 1.2)


def test_nothing_is_collected_while_the_clock_runs():
    seen = []
    assert gc.isenabled()
    measuring.rate(lambda: seen.append(gc.isenabled()) or 1, 1e-9)
    with pytest.raises(ZeroDivisionError):
        measuring.rate(lambda: seen.append(gc.isenabled()) or 1 // 0, 1e-9)
    assert seen == [False, False] and gc.isenabled()


def empty_results():
    return benchmark.Results("replay", {}, {}, {})


def test_a_row_is_the_median_of_the_ratios_of_each_round():
    rows = {
        "x/fast": benchmark.Row("g", ("a", "b"), "a over b", benchmark.Target(1.5, True)),
        "x/lean": benchmark.Row("g", ("b", "a"), "b over a", benchmark.Target(0.3, False)),
        "x/gone": benchmark.Row("g", ("a", "c"), "a over c", benchmark.Target(1.0, True)),
        "x/other": benchmark.Row("h", ("a", "b"), "of another group"),
    }
    results = empty_results()
    figures = {"a": [2.0, 9.0, 8.0], "b": [1.0, 3.0, 8.0]}
    results.add_rates("g", figures)
    results.add_rows(rows, "g", figures, {"c": "no c here"})
    assert results.ratios == {"x/fast": 2.0, "x/lean": 0.5}
    assert results.spread == {"x/fast": [1.0, 3.0], "x/lean": [pytest.approx(1 / 3), 1.0]}
    assert results.rows_per_second["g/a"] == {"median": 8.0, "min": 2.0, "max": 9.0}
    assert results.targets == {"x/fast": ">= 1.5", "x/lean": "<= 0.3", "x/gone": ">= 1"}
    assert results.skipped == {"x/gone": "no c here"}
    lines = results.tables(rows).splitlines()
    assert lines[2] == "| x/fast | 2.00 | 1.00-3.00 | >= 1.5 | met | a over b |"
    assert lines[3] == "| x/lean | 0.500 | 0.333-1.00 | <= 0.3 | above target | b over a |"
    assert "| g/a | 8 | 2-9 |" in lines and lines[-1] == "skipped x/gone: no c here"


@pytest.mark.parametrize(
    "target, found, word",
    [((0.8, True), 0.8, "met"), ((0.8, True), 0.79, "below target"), ((1.3, False), 1.3, "met"),
     ((1.3, False), 1.31, "above target")],
)  # fmt: skip
def test_targets(target, found, word):
    assert benchmark.Target(*target).verdict(found) == word


@pytest.mark.parametrize("value, text", [(0.02034, "0.0203"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1234")])
def test_figures_have_three_digits(value, text):
    assert measuring._digits(value) == text


# -- the data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring():
    return benchmark.make_ring(2048, RowLayout(benchmark.OBS, benchmark.ACTION))


def test_rows_lie_as_workers_write_them(ring):
    flags = ring.layout.view(ring.rows, "flags")
    assert ring.head == ring.num_steps == 128 and flags.shape == (128, 16)
    assert (flags == flags[:, :1]).all()
    episode = flags[:51, 0]
    assert (flags[51:102, 0] == episode).all()
    assert [np.flatnonzero(episode & flag).tolist() for flag in (FIRST, TRUNCATED, BORDER)] == [[0], [49], [50]]
    assert np.flatnonzero(episode & SWITCHED).tolist() == [0, 10, 20, 30, 40]
    option, previous, age = (ring.layout.view(ring.rows, n)[:51] for n in ("option", "previous_option", "option_age"))
    assert set(option.ravel().tolist()) == {0, 1, 2, 3}
    assert (option[0:10] == option[0]).all() and (previous[0] == -1).all()
    assert (previous[10] == option[9]).all() and (previous[11] == option[11]).all()
    assert age[8:12, 0].tolist() == [8, 9, 0, 1] and age[50, 0] == 10


def test_others_get_the_rows_that_can_be_drawn(ring):
    found = benchmark.Transitions.of(ring)
    # Steps 2 to 126 can be read; two of them are borders.
    assert found.obs.shape == (123, 16, 93) and len(found) == 123 * 16
    obs, words = ring.layout.view(ring.rows, "obs"), ring.layout.words
    assert (found.obs[0] == obs[2]).all() and (found.next_obs[0] == obs[3]).all()
    # The step of an end is followed by the border, which holds the true last observation.
    assert found.truncated[47].all() and (found.next_obs[47] == obs[50]).all() and (found.obs[48] == obs[51]).all()
    assert (found.packed[..., :words].view(np.int32) == ring.rows[2:127][found_steps()].view(np.int32)).all()
    assert (found.packed[..., words:] == found.next_obs).all()


def found_steps():
    steps = np.arange(2, 127)
    return steps % 51 != 50


def test_episodes_lie_in_one_piece_for_others(ring):
    found = benchmark.Transitions.of(ring)
    episodes, ends = found.episodes(), found.flat("truncated")
    begins = np.flatnonzero(np.diff(episodes, prepend=-1))
    assert len(begins) == len(np.unique(episodes)) == 3 * 16
    assert np.diff(begins)[:3].tolist() == [48, 50, 25]
    assert (ends[begins[1:2] - 1]).all() and ends.sum() == 2 * 16
    assert (found.flat("obs")[123] == found.obs[0, 1]).all()


def test_the_floor_moves_as_many_bytes(ring):
    batch = ReplayMemory([ring], 0).sample(1, 8)
    floor = benchmark.Transitions.of(ring).packed
    assert batch.rows[0, 0].nbytes + batch.next_obs[0, 0].nbytes == floor[0, 0].nbytes
    packed = benchmark.packed_noise(70_000, 3)
    assert packed.shape == (70_000, 3) and bool((packed[:4464] == packed[65_536:]).all())


def test_arms_return_the_rows_that_they_got(ring):
    args = benchmark.parse_args(["replay", *TINY])
    task = benchmark.HandReach(args)
    assert task.sample()() == 32 and task.sample(updates=1)() == 16 and task.hindsight()() == 32
    assert benchmark.gather_arm(torch.zeros(9, 4), 5)() == 5
    memory = task.memory()
    count = benchmark.sample_arm(memory, 2, 16, 16)()
    batch = ReplayMemory([task.ring], 0, num_options=4).sample(2, 16, 16)
    assert count == int(batch.valid.sum()) < 2 * 16 * 16


def test_priorities_are_written_back(ring):
    sampler = Prioritized(0.6, 0.4)
    call = benchmark.prioritized_arm(ReplayMemory([ring], 0, sampler), 2, 16)
    assert call() == 32
    priorities = sampler._tree[:]
    assert 20 < np.count_nonzero(~np.isin(priorities, [0.0, 1.0])) <= 32
    first, second = benchmark.errors_of(4), benchmark.errors_of(4)
    assert all((next(first) == next(second)).all() for _ in range(20))


# -- other packages ---------------------------------------------------------------------------------------------------


class Sb3Buffer:
    made = []

    def __init__(self, size, observations, actions, env=None, device="cpu", n_envs=1, **settings):
        self.size, self.added = size, []
        self.rows = {"obs": np.zeros((size, 190), np.float64)}
        self.dones = np.zeros(size, np.float32)
        self.made.append(self)

    def add(self, obs, next_obs, action, reward, done, infos):
        assert [info["TimeLimit.truncated"] for info in infos] == done.tolist()
        self.added.append(obs)

    def sample(self, count):
        return SimpleNamespace(rewards=np.zeros(count))


class TianshouBuffer:
    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def from_data(cls, **fields):
        assert set(fields) == {"obs", "act", "rew", "terminated", "truncated", "done", "obs_next"}
        return cls(len(fields["obs"]))

    def sample(self, count):
        return range(count), np.arange(count)


class TianshouPrioritized(TianshouBuffer):
    def __init__(self, size, alpha, beta):
        super().__init__(0)
        self.size = size

    def update(self, other):
        self.rows = other.rows
        assert self.rows == self.size

    def update_weight(self, indices, weights):
        assert len(indices) == len(weights)


class TorchrlBuffer:
    def __init__(self, storage, batch_size, sampler=None):
        self.storage, self.batch_size = storage, batch_size

    def extend(self, content):
        assert len(content["observation"]) == len(content["next"]["reward"]) == self.storage

    def sample(self):
        return range(self.batch_size)


@pytest.fixture
def peers(monkeypatch):
    """Stand-ins that check what they are given."""
    modules = {
        "stable_baselines3.common.buffers": {"ReplayBuffer": Sb3Buffer, "DictReplayBuffer": Sb3Buffer},
        "stable_baselines3.her.her_replay_buffer": {"HerReplayBuffer": Sb3Buffer},
        "tianshou.data": {"ReplayBuffer": TianshouBuffer, "PrioritizedReplayBuffer": TianshouPrioritized},
        "torchrl.data": {"TensorDictReplayBuffer": TorchrlBuffer, "LazyTensorStorage": lambda size: size},
        "torchrl.data.replay_buffers.samplers": {"SliceSampler": lambda **settings: settings},
        "tensordict": {"TensorDict": lambda content, batch_size: content},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Sb3Buffer, "made", [])
    return SimpleNamespace(names=list(modules))


def test_a_whole_run_with_all_packages(peers, tmp_path, capsys, settings_of_the_process):
    file = tmp_path / "replay.json"
    assert benchmark.main(["replay", *QUICK, "--json", str(file)]) == 0
    assert settings_of_the_process == [("threads", 1), "keep_freed_memory"]
    found = json.loads(file.read_text())
    assert found["suite"] == "replay" and found["settings"]["rows"] == 2048 and found["skipped"] == {}
    assert set(found["ratios"]) == set(found["spread"]) == set(benchmark.REPLAY_ROWS)
    assert found["targets"] == {
        "replay/uniform_to_gather": ">= 0.8",
        "replay/prioritized_to_tianshou": ">= 1.5",
        "replay/segments_to_torchrl": ">= 5",
        "replay/growth": "<= 1.3",
        "replay/bytes_per_row": "<= 1.05",
        "replay/bytes_to_sb3": "<= 0.3",
    }
    for name, value in found["ratios"].items():
        low, high = found["spread"][name]
        assert 0 < low <= value <= high, name
    assert {"growth/gather_large", "gather/gather", "samplers/two_rings"} <= set(found["rows_per_second"])
    assert {"threads", "cores", "processor", "load"} <= set(found["machine"])
    assert {"python", "numpy", "torch"} <= set(found["versions"])
    text = capsys.readouterr()
    assert "threads: " in text.out and "torch 2" in text.out and "| replay/growth | " in text.out
    # Both buffers that are sampled from hold all that our ring holds; those that are only weighed hold nothing.
    assert [len(buffer.added) for buffer in Sb3Buffer.made] == [123, 123, 0, 0]
    assert set(Sb3Buffer.made[1].added[0]) == {"observation", "achieved_goal", "desired_goal"}


def test_bytes_count_borders_and_everything_that_others_hold(peers, tmp_path):
    file = tmp_path / "replay.json"
    args = benchmark.parse_args(["replay", *QUICK, "--json", str(file)])
    bench = benchmark.Bench(args, empty_results(), benchmark.REPLAY_ROWS)
    benchmark.measure_bytes(bench, benchmark.HandReach(args))
    found = json.loads(file.read_text())
    usable, row = 123 * 16, 4 * (93 + 20 + 3 + 5)
    ours = (4096 + 2048 * row) / usable
    assert found["bytes_per_row"]["ring"] == pytest.approx(ours)
    assert found["bytes_per_row"]["ring_hindsight"] == pytest.approx(ours + 8 * 2048 / usable)
    assert found["bytes_per_row"]["sb3"] == 190 * 8 + 4
    assert found["ratios"]["replay/bytes_per_row"] == pytest.approx(ours / row)
    assert found["ratios"]["replay/bytes_to_sb3"] == pytest.approx(ours / (190 * 8 + 4))


def test_rows_of_missing_packages_say_how_to_have_them(peers, monkeypatch, tmp_path, capsys):
    for name in peers.names:
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "replay.json"
    assert benchmark.main(["replay", *QUICK, "--json", str(file)]) == 0
    skipped = json.loads(file.read_text())["skipped"]
    assert set(skipped) == set(PEER_ROWS)
    out = capsys.readouterr().out
    for row, package in PEER_ROWS.items():
        assert skipped[row].startswith(f"{package} is missing") and skipped[row].endswith(measuring.PEERS[package])
        assert f"skipped {row}: {skipped[row]}\n" in out
    assert "| replay/uniform_to_gather | " in out


def test_a_package_that_fails_costs_its_own_rows_only(peers, monkeypatch):
    monkeypatch.setattr(TianshouBuffer, "sample", lambda self, count: 1 // 0)
    args = benchmark.parse_args(["replay", *QUICK])
    bench = benchmark.Bench(args, empty_results(), benchmark.REPLAY_ROWS)
    benchmark.measure_gather(bench, benchmark.HandReach(args))
    assert list(bench.results.skipped) == ["replay/tianshou_to_gather"]
    assert bench.results.skipped["replay/tianshou_to_gather"].startswith("tianshou failed (ZeroDivisionError: ")
    assert {"replay/uniform_to_gather", "replay/torchrl_to_gather"} <= set(bench.results.ratios)


def test_other_packages_can_be_left_out(peers):
    args = benchmark.parse_args(["replay", *QUICK, "--skip-peers"])
    bench = benchmark.Bench(args, empty_results(), benchmark.REPLAY_ROWS)
    benchmark.measure_segments(bench, benchmark.HandReach(args))
    assert set(bench.results.skipped.values()) == {"left out by --skip-peers"} and bench.results.ratios == {}
    assert set(bench.results.rows_per_second) == {"segments/segments", "segments/segments_single"}


@pytest.mark.parametrize("free, words", [(4_000_000, 20), (100_000, None)])
def test_growth_is_measured_as_memory_allows(free, words, monkeypatch, capsys):
    layouts = []
    real = benchmark.make_ring
    monkeypatch.setattr(benchmark, "available_memory", lambda: free)
    monkeypatch.setattr(benchmark, "make_ring", lambda rows, layout: layouts.append(layout) or real(rows, layout))
    args = benchmark.parse_args(["replay", *QUICK])
    bench = benchmark.Bench(args, empty_results(), benchmark.REPLAY_ROWS)
    benchmark.measure_growth(bench, benchmark.HandReach(args))
    names = {"replay/growth", "replay/prioritized_growth", "replay/gather_growth"}
    if words is None:
        assert layouts == [] and set(bench.results.skipped) == names
        assert all("lower --large-rows" in reason for reason in bench.results.skipped.values())
    else:
        assert [layout.words for layout in layouts] == [words, words] and set(bench.results.ratios) == names
        assert "observations of 8" in bench.results.notes[0] in capsys.readouterr().err


def test_the_spaces_are_those_of_the_task():
    gymnasium = pytest.importorskip("gymnasium")
    robotics = pytest.importorskip("gymnasium_robotics")
    gymnasium.register_envs(robotics)
    env = gymnasium.make(benchmark.TASK)
    observations, actions = benchmark.goal_spaces(np.float64)
    assert env.observation_space == observations and env.action_space == actions
    env.close()


# -- collecting -------------------------------------------------------------------------------------------------------

COLLECT = ["collect", "--rounds", "1", "--seconds", "1e-9", "--lanes", "8"]


def test_a_whole_run_of_collecting_has_all_rows(tmp_path, monkeypatch):
    collect = sys.modules["benchmark_collect"]
    monkeypatch.setattr(collect, "SIMULATORS", {**collect.SIMULATORS, "hand_reach": (2, "MountainCarContinuous-v0")})
    file = tmp_path / "collect.json"
    assert benchmark.main([*COLLECT, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found["ratios"]) | set(found["skipped"]) == set(benchmark.COLLECT_ROWS)
    assert {"collect/bridge_to_memcpy", "collect/pause_to_raw"} <= set(found["ratios"])


def test_the_bridge_writes_what_the_simulator_gave(monkeypatch):
    collect = sys.modules["benchmark_collect"]
    rings = []
    real = collect.LaneRing
    monkeypatch.setattr(collect, "LaneRing", lambda *args: rings.append(real(*args)) or rings[-1])
    env = collect.Repeating(3, 5, 2)
    call = collect.collect_arm(env, collect.Idle(3, 2), 8)
    assert [call() for _ in range(9)] == [3] * 9
    (ring,) = rings
    assert ring.head == 9
    np.testing.assert_array_equal(ring.layout.view(ring.rows[2], "obs"), env.result.obs)
    np.testing.assert_array_equal(ring.layout.view(ring.rows[2], "reward"), env.result.reward)


def test_copies_go_round_their_memory():
    collect = sys.modules["benchmark_collect"]
    assert [collect.copy_arm(4, 3, steps=2)() for _ in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("lanes", ["0", "-1"])
def test_lanes_are_checked(lanes, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(["collect", "--lanes", lanes])
    assert "--lanes must be at least 1" in capsys.readouterr().err


def test_sizes_that_no_memory_holds_are_one_line(monkeypatch, capsys):
    def fail(args):
        raise MemoryError("Unable to allocate 86.1 GiB")

    monkeypatch.setattr(benchmark, "measure_suite", fail)
    assert benchmark.main(["collect"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "86.1 GiB" in line and "take smaller sizes" in line


def test_a_whole_run_of_callbacks_has_both_rows_and_a_share_of_each(monkeypatch, capsys):
    room = sys.modules["benchmark_callbacks"]
    monkeypatch.setattr(room, "BATCH", 8)
    monkeypatch.setattr(room, "LOG_EVERY", 2)
    monkeypatch.setitem(room.SETTINGS, "hidden_sizes", [8])
    monkeypatch.setitem(room.SETTINGS, "option_hidden_sizes", [8])
    monkeypatch.setitem(room.SETTINGS, "option_batch_size", 0)
    assert benchmark.main(["callbacks", "--rounds", "1", "--steps", "4"]) == 0
    out, err = capsys.readouterr()
    assert "| callbacks/run_time |" in out and "| callbacks/share_of_hooks |" in out
    for name in ("OptionDiagnostics", "QRange", "PipelineThroughput", "WorkerHealth"):
        assert f"{name}: " in err
    with pytest.raises(SystemExit):
        benchmark.main(["callbacks", "--steps", "1"])
