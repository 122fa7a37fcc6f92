"""Hindsight: goals out of the sample's own episode, the reward that belongs to them, nothing else changed."""

import json

import numpy as np
import pytest
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.replay import Hindsight, Relabeller, ReplayMemory
from claw_lightning.replay.memory import Draw
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.ring import HAS_FINAL, QUARANTINED, LaneRing, RowLayout
from tests.builders import lane_rows, without_successors, write_step

# Observation: step, lane, achieved goal (step, lane), desired goal (-1, -1).
OBS_SIZE, ACHIEVED, DESIRED = 6, (2, 4), (4, 6)
FINAL = 0.5  # a true final observation of same-step autoreset is that of its row plus this


def spec_of(**changes):
    return EnvSpec("goals", OBS_SIZE, 1, [-1.0], [1.0], achieved_goal=ACHIEVED, desired_goal=DESIRED, **changes)


def reward(achieved, desired):
    return -np.abs(achieved - desired).sum(-1).astype(np.float32)


class Story:
    """A ring of lanes of (length, end) episodes; goal achieved on arriving in the row after step t: (t + 1, lane)."""

    def __init__(self, lanes, num_steps=64, same_step=False):
        self.flags = [[flags | (HAS_FINAL if final is not None else 0) for _, flags, final in lane_rows(e, same_step)]
                      for e in lanes]  # fmt: skip
        self.flags = [list(row) for row in zip(*self.flags, strict=False)]
        self.ring = LaneRing(RowLayout(OBS_SIZE, 1, has_finals=same_step), num_steps, len(lanes))
        self.same_step = same_step

    def play(self, last=None, sick=()):
        while self.ring.head < (len(self.flags) if last is None else last):
            t = self.ring.head
            obs = np.array([[t, lane, t, lane, -1, -1] for lane in range(self.ring.num_lanes)], np.float32)
            flags, finals = list(self.flags[t]), {}
            for lane in range(self.ring.num_lanes):
                if (t, lane) in sick:
                    flags[lane] |= QUARANTINED
                    obs[lane, 2] = np.nan
                elif flags[lane] & HAS_FINAL:
                    finals[lane] = obs[lane] + FINAL
            write_step(self.ring, obs, flags, finals)
        return self


def memory_of(story, strategy="future", share=1.0, seed=0, **spec):
    rings = [s.ring for s in (story if isinstance(story, list) else [story])]
    return ReplayMemory(rings, seed, relabeller=Relabeller(Hindsight(strategy, share), spec_of(**spec), reward, rings))


def drawn(memory, count=2000, length=1):
    """step, lane, goal step, goal lane, reward, achieved step of the next observation: [M] (or [M, L])."""
    batch = memory.sample(2, count // 2, length)
    parts = (batch.obs[..., 0], batch.obs[..., 1], batch.obs[..., 4], batch.obs[..., 5], batch.reward)
    return [x.flatten(0, 1).numpy() for x in (*parts, batch.next_obs[..., 2])], batch


EPISODES = [(6, "truncated"), (1, "terminated"), (9, "cut"), (4, "truncated"), (5, "truncated")]


def spans_of(story):
    """{(step, lane): (first, last step whose next observation is known)} by the builder's own episodes."""
    found = {}
    for lane in range(story.ring.num_lanes):
        begin = None
        flags = [row[lane] for row in story.flags]
        for t, value in enumerate(flags):
            if value & 8:  # border
                begin = None
                continue
            if value & 4 or begin is None:  # first
                begin = t
            end = t
            while not flags[end] & 3 and end + 1 < story.ring.head - 1 and not flags[end + 1] & 12:
                end += 1
            if not flags[end] & 3 and end + 1 < len(flags) and flags[end + 1] & 12:
                end -= 1
            found[t, lane] = (begin, end)
    return found


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_come_out_of_the_own_episode(strategy, same_step):
    story = Story([EPISODES, [(3, "terminated"), *EPISODES]], same_step=same_step).play()
    (step, lane, goal, goal_lane, got, achieved), batch = drawn(memory_of(story, strategy))
    spans, is_final = spans_of(story), goal % 1 != 0
    assert (np.floor(goal_lane) == lane).all()
    source = np.where(is_final, np.floor(goal), goal - 1)  # the step that arrived there
    for t, n, where in zip(step, lane, source, strict=True):
        begin, end = spans[int(t), int(n)]
        first = {"future": t, "final": end, "episode": begin}[strategy]
        assert first <= where <= end, (t, n, where)
    assert is_final.any() == same_step
    # Both observations show it, and the reward is that of the next observation's achieved goal.
    assert torch.equal(batch.obs[..., 4:6], batch.next_obs[..., 4:6])
    both = batch.next_obs[..., 2:4], batch.next_obs[..., 4:6]
    np.testing.assert_allclose(got, reward(*(x.flatten(0, 1).numpy() for x in both)))
    if strategy == "future":
        assert (got == 0).any() and (got < 0).any()


def test_the_future_is_drawn_evenly():
    story = Story([[(40, "truncated")]]).play()
    (step, _, goal, _, _, _), _ = drawn(memory_of(story), 40_000)
    for t in (0, 20, 35):
        counts = np.bincount(goal[step == t].astype(int) - 1 - t, minlength=40 - t)
        assert len(counts) == 40 - t
        expected = counts.sum() / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < len(counts) + 4 * np.sqrt(2 * len(counts))


def test_the_share_and_nothing_but_goal_and_reward_is_changed():
    story = Story([EPISODES] * 2).play()
    plain = ReplayMemory([story.ring], 0).sample(1, 4000)
    memory = memory_of(story, share=0.8)
    batch = memory.sample(1, 4000)
    again = batch.obs[0, :, 4] != -1
    assert abs(float(again.float().mean()) - 0.8) < 0.03
    kept = batch.rows.clone().view(1, 4000, -1)
    layout = story.ring.layout
    start, stop = layout.fields["obs"]
    kept[..., start + 4 : stop], kept[..., layout.fields["reward"][0]] = -1, 0
    other = plain.rows.clone()
    other[..., layout.fields["reward"][0]] = 0
    rows = {tuple(row) for row in other[0].view(torch.int32).tolist()}
    assert {tuple(row) for row in kept[0].view(torch.int32).tolist()} <= rows
    assert (batch.next_obs[0][~again][:, 4:] == -1).all()


def test_segments_have_one_goal():
    story = Story([EPISODES] * 2).play()
    batch = memory_of(story).sample(1, 2000, 4)
    valid, goal = batch.valid[0], batch.obs[0, ..., 4]
    assert (goal == goal[:, :1])[valid].all() and (without_successors(batch)[~valid.numpy()] == 0).all()
    expected = reward(batch.next_obs[0, ..., 2:4].numpy(), batch.next_obs[0, ..., 4:6].numpy())
    np.testing.assert_allclose(batch.reward[0][valid], expected[valid.numpy()])


def test_of_an_open_episode_the_latest_goals():
    story = Story([[(60, "cut")]]).play(20)
    (step, _, goal, _, _, _), _ = drawn(memory_of(story, "final"))
    assert (goal == 19).all() and step.max() == 18
    memory = memory_of(story, "final")
    memory.sample(1, 1)
    story.play(30)
    assert (memory.sample(1, 100).obs[..., 4] == 29).all()


def test_goals_that_are_not_finite_are_never_given():
    story = Story([[(30, "truncated")]]).play(sick={(t, 0) for t in range(3, 30, 3)})
    (step, _, goal, _, _, _), batch = drawn(memory_of(story))
    assert torch.isfinite(batch.rows).all() and torch.isfinite(batch.next_obs).all()
    assert not np.isin(goal, np.arange(3, 30, 3)).any()
    assert (goal == -1).any()  # left as they were


def test_several_rings_that_have_wrapped():
    stories = [Story([EPISODES * 4] * n, num_steps=40).play() for n in (2, 1)]
    for number, story in enumerate(stories):
        story.ring.layout.view(story.ring.rows, "action")[:] = number
    memory = memory_of(stories)
    batch = memory.sample(2, 2000)
    assert all(story.ring.head > 2 * 40 for story in stories)
    spans = [spans_of(story) for story in stories]
    for ring, t, lane, goal in zip(
        *(x.flatten().int().tolist() for x in (batch.action[..., 0], *(batch.obs[..., i] for i in (0, 1, 4)))),
        strict=True,
    ):
        _, end = spans[ring][t, lane]
        assert t + 1 <= goal <= end + 1


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_rows_overtaken_by_the_writer_give_no_goals(monkeypatch, strategy):
    story = Story([[(200, "cut")]], num_steps=32).play(60)
    memory = memory_of(story, strategy)
    copy = memory.relabeller.goals

    def overtaken(*args):
        if story.ring.head < 70:
            story.play(70)
        return copy(*args)

    monkeypatch.setattr(memory.relabeller, "goals", overtaken)
    (step, _, goal, _, _, _), _ = drawn(memory)
    assert step.min() > 70 - 32  # the others were drawn anew
    assert ((goal == -1) | (goal >= 70 - 32 + 1)).all()


def test_a_recorded_draw_is_repeated_to_the_bit():
    stories = [Story([EPISODES * 6] * 2, num_steps=40) for _ in range(2)]
    memory, taken = memory_of(stories, share=0.5), []
    for head in (30, 41, 80, 81, 120):
        for story in stories:
            story.play(head)
        taken.append((memory.sample(2, 100), json.dumps(memory.last_draw.to_json())))
    copies = [Story([EPISODES * 6] * 2, num_steps=40) for _ in range(2)]
    replica = memory_of(copies, share=0.5)
    for batch, values in taken:
        script = Draw.from_json(json.loads(values))
        for story, head in zip(copies, script.heads, strict=True):
            story.play(head)
        again = replica.sample(2, 100, script=script)
        assert torch.equal(batch.rows.view(torch.int32), again.rows.view(torch.int32))
        assert torch.equal(batch.next_obs, again.next_obs)


@pytest.mark.parametrize("side", ["obs", "next_obs"])
def test_rewards_are_held_against_the_simulator_on_the_side_where_it_shows_the_goal(side):
    """The goal changes at step 10: the reward of step 9 belongs to the old one (obs) or to the new one (next_obs)."""
    ring = LaneRing(RowLayout(OBS_SIZE, 1), 64, 1)
    for t in range(40):
        goals = [t // 2, (t + 1) // 2]  # shown at t and at t + 1
        shown = goals[0] if side == "obs" else goals[1]
        write_step(ring, [[t, 0, t, 0, goals[0], 0]], [0])
        ring.layout.view(ring.rows, "reward")[t, 0] = reward(np.array([t + 1.0, 0]), np.array([shown, 0.0]))
    for read in ("obs", "next_obs"):
        relabeller = Relabeller(Hindsight(), spec_of(goal_in_reward=read), reward, [ring])
        if read == side:
            relabeller.check_reward([ring], "the simulator")
        else:
            with pytest.raises(
                ConfigError, match="of 39 rewards of the simulator differ from the goal reward of task goals"
            ):
                relabeller.check_reward([ring], "the simulator")


@pytest.mark.parametrize(
    "settings, message",
    [({"strategy": "past"}, "data.hindsight.strategy is 'past'; use future"), ({"share": 0.0}, "data.hindsight.share"),
     ({"share": 1.5}, "data.hindsight.share is 1.5"), ({"share": float("nan")}, "data.hindsight.share is nan")],
)  # fmt: skip
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Hindsight(**settings)


def test_a_task_without_goals_is_refused():
    with pytest.raises(ConfigError, match="task flat has no achieved_goal"):
        Relabeller(Hindsight(), EnvSpec("flat", 3, 1, [-1.0], [1.0]), reward, [])


def test_nothing_is_relabelled_across_a_restart():
    """The worker was replaced after a row whose next observation died with it, also after an end."""
    story = Story([[(9, "cut"), (9, "cut"), (9, "terminated"), (9, "cut")] * 3], num_steps=200)
    flags = [row for row in story.flags if not row[0] & 8]  # as if the end's observation had never been written
    story.flags = flags
    memory = memory_of(story.play(), "episode")
    (step, _, goal, _, _, _), batch = drawn(memory, 6000)
    begins = np.flatnonzero([row[0] & 4 for row in flags])
    begin = begins[np.searchsorted(begins, step, "right") - 1]
    end = np.append(begins, len(flags))[np.searchsorted(begins, step, "right")]
    taken = goal >= 0
    assert taken.any() and ((goal > begin) & (goal < end))[taken].all()


def test_a_goal_reward_that_is_no_number_is_noticed():
    story = Story([[(30, "truncated")]]).play()
    relabeller = Relabeller(Hindsight(), spec_of(), lambda a, d: np.full(a.shape[:-1], np.nan), [story.ring])
    with pytest.raises(ConfigError, match="rewards of the simulator differ"):
        relabeller.check_reward([story.ring], "the simulator")
