"""Event log and playback: an overlapped run comes out bit-identical in one process, its failures included."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from claw_lightning.data import EnvConfig
from claw_lightning.errors import ConfigError
from claw_lightning.events import EventLog, Playback
from claw_lightning.hooks import UpdateCallback
from claw_lightning.process import SEED_STRIDE
from claw_lightning.replay.memory import Draw
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import FAKES
from tests.runs import fit_lockstep, make_data, tensors


def ring_of_versions(*versions):
    ring = LaneRing(RowLayout(1, 1), 16, 2)
    for version in versions:
        ring.layout.view(ring.slot(), "version")[:] = version
        ring.publish()
    return ring


def draw_at(*heads):
    return Draw(heads, (heads,), ((0,) * len(heads),), heads)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_version_is_written_down_where_it_changes_and_where_a_process_begins(tmp_path):
    log = EventLog(tmp_path / "logs" / "events.jsonl")
    rings = [ring_of_versions(0, 0, 8, 8, 8), ring_of_versions(8, 8)]
    log.draw(rings, draw_at(3, 1), 4)
    log.write("start", worker=0, head=4)
    log.draw(rings, draw_at(5, 2), 8)
    log.close()
    log.close()
    found = [event for event in events(log.path) if event["event"] == "draw"]
    assert [event["versions"] for event in found] == [[[0, 0, 0], [0, 2, 8], [1, 0, 8]], [[0, 4, 8]]]
    assert [(event["updates"], event["heads"]) for event in found] == [(4, [3, 1]), (8, [5, 2])]
    assert Draw.from_json(found[1]["draw"]) == draw_at(5, 2)


def test_steps_that_were_overwritten_unseen_end_the_log(tmp_path, caplog):
    log = EventLog(tmp_path / "events.jsonl")
    log.draw([ring_of_versions(*range(20))], draw_at(18), 0)
    log.write("end")
    assert "raise data.capacity" in caplog.text and events(log.path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path / "events.jsonl")
    for _ in range(3):
        log.write("end")
    log.close()
    assert caplog.text.count("no further events are recorded (No space left on device)") == 1


RUN = {"event": "run", "settings": {"seed": 3, "batch_size": 16}}
DRAW = {"event": "draw", "updates": 0, "heads": [1], "versions": [[0, 0, 7]], "draw": draw_at(1).to_json()}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "lines, words",
    [
        (None, "cannot be read"),
        ([], "not the event log"),
        ([DRAW], "not the event log"),
        ([RUN], "no draw"),
        ([RUN, "nonsense\n", DRAW], "line 2"),
        ([RUN, "3\n", DRAW], "line 2"),
        ([RUN, {"time": 3.0}, DRAW], "line 2"),
        ([RUN, {"event": "start", "worker": 0}, DRAW], "line 2"),
        ([RUN, {**DRAW, "versions": [1]}], "line 2"),
        (["[]\n"], "not the event log"),
        ([{"event": "run"}, DRAW], "line 1"),
        (["\x00\xff\n", RUN, DRAW], "line 1"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(tmp_path, lines, words):
    path = tmp_path / "events.jsonl"
    if lines is not None:
        write(path, *lines)
    with pytest.raises(ConfigError, match=words) as error:
        Playback(path)
    assert "data.replay_events" in str(error.value) and "\n" not in str(error.value)


def test_the_log_of_a_killed_run_is_played_up_to_its_last_whole_line(tmp_path):
    played = Playback(write(tmp_path / "e.jsonl", RUN, DRAW, '{"event": "dr'))
    assert len(played.draws) == 1


def test_another_configuration_is_named(tmp_path):
    played = Playback(write(tmp_path / "e.jsonl", RUN, DRAW))
    played.check({"seed": 3, "batch_size": 16, "more": 1})
    with pytest.raises(ConfigError, match="recorded with batch_size 16, not 32"):
        played.check({"seed": 3, "batch_size": 32})


def test_a_policy_that_was_not_published_is_named(tmp_path):
    played = Playback(write(tmp_path / "e.jsonl", RUN, DRAW))
    played.publish(np.zeros(3, np.float32), 6)
    with pytest.raises(ConfigError, match="took step 0 with version 7"):
        played._take(0, 0)
    played.publish(np.ones(3, np.float32), 7)
    values, version = played._take(0, 0)
    assert version == 7 and values.tolist() == [1, 1, 1]
    assert not played._history and played._take(0, 1) is None


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"record_events": True}, "data.record_events.*overlapped"),
        ({"replay_events": "x"}, "data.replay_events.*overlapped"),
    ],
)
def test_settings_that_exclude_each_other(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_data(**settings)


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"mode": "overlapped", "record_events": True},
            "data.record_events: IsaacGymEnv .* never be played again; leave",
        ),
        ({"mode": "overlapped", "replay_events": "x"}, "data.replay_events: IsaacGymEnv cannot run in the learner's"),
        ({"mode": "lockstep"}, "data.mode lockstep: IsaacGymEnv .*; set data.mode to overlapped"),
    ],
)
@pytest.mark.parametrize("class_path", ["IsaacGymEnv", "claw_lightning.rollout.envs.isaacgym.IsaacGymEnv"])
def test_a_simulator_that_cannot_be_played_here_is_not_recorded(settings, words, class_path):
    env = EnvConfig(class_path, {"task": "ShadowHand"})
    with pytest.raises(ConfigError, match=words):
        make_data(env=env, **settings)
    make_data(env=env, mode="overlapped")


def test_an_adapter_that_cannot_be_imported_here_is_left_to_the_worker():
    make_data(env=EnvConfig("nowhere.Env"), mode="overlapped", record_events=True)


class Trouble(UpdateCallback):
    """Kills a worker, then changes the simulators, then kills the other one."""

    def on_batch_sampled(self, trainer, module, batch):
        data = trainer.datamodule
        pids = data.processes()
        if module.updates == 20:
            os.kill(pids["worker_0"], signal.SIGKILL)
        elif module.updates == 60:
            data.configure_envs(bonus=0.5)
        elif module.updates == 80:
            os.kill(pids["worker_1"], signal.SIGKILL)


@pytest.mark.slow
def test_a_run_with_failures_is_run_again_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(FAKES)
    monkeypatch.syspath_prepend(FAKES)  # the playback builds simulators here
    data = {
        "env": EnvConfig("fake_envs.ConfigurableEnv"), "mode": "overlapped", "num_workers": 2, "envs_per_worker": 2,
        "max_env_steps": 800,
    }  # fmt: skip
    settings = {"model": {"num_options": 2}, "limit_val_batches": 0}
    _, recorded, _ = fit_lockstep(tmp_path, 3, [Trouble()], data={**data, "record_events": True}, **settings)
    log = tmp_path / "events.jsonl"
    kinds = [event["event"] for event in events(log)]
    # A worker that is killed before it has taken the settings over does not say so; its successor starts with them.
    assert kinds.count("failure") == 2 and kinds.count("configured") >= 1 and kinds[-1] == "end"
    starts = [event["generation"] for event in events(log) if event["event"] == "start"]
    assert sorted(starts) == [0, 0, 1, 1] and SEED_STRIDE > 0

    _, again, played = fit_lockstep(tmp_path, 3, data={**data, "replay_events": str(log)}, **settings)
    assert played.processes() == {} and again.updates == recorded.updates == 350
    assert played.env_steps == again.env_steps == recorded.env_steps
    same = dict(tensors(recorded))
    assert all(torch.equal(value, same[name]) for name, value in tensors(again))

    with pytest.raises(ConfigError, match="recorded with data.seed 3, not 4"):
        fit_lockstep(tmp_path, 4, data={**data, "replay_events": str(log)}, **settings)
