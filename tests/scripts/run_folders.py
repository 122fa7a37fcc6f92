"""Run folders as a training leaves them, made in a moment: real event files, recorded episodes, worker events."""

import csv

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter

STEPS = 20_000
EPISODE = 40


def write_run(
    folder, *, num_options=4, seed=0, gain=1.0, moments=3, has_health=True, has_histograms=True, task="Hand-v0"
):
    """A run whose return rises to ``gain``; in its recorded episodes K options take turns."""
    folder.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "trainer": {"max_time": None, "logger": {"init_args": {"save_dir": str(folder.parent)}}, "callbacks": None},
        "model": {"num_options": num_options, "gamma": 0.9, "reward_scale": 1.0},
        "data": {"env": {"class_path": "GymnasiumEnv", "init_args": {"task": task}}, "num_workers": 2},
    }
    (folder / "config.yaml").write_text("# lightning.pytorch==2.6.6\n" + yaml.safe_dump(config))
    write_events(folder, num_options, gain, seed, has_health, has_histograms)
    if moments:
        (folder / "episodes").mkdir()
        for steps in np.linspace(STEPS / moments, STEPS, moments).astype(int):
            write_recording(folder / "episodes" / f"{steps:010d}.npz", int(steps), num_options)
    if has_health:
        with (folder / "worker_events.csv").open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["seconds", "env_steps", "worker", "event", "detail"])
            table.writerow([0.5, 0, "worker_0", "start", ""])
            table.writerow([90, 6000, "worker_1", "death", 'exit status -9, "killed"'])
            table.writerow([93.5, 6200, "worker_1", "restart", "1 of 5"])


def write_events(folder, num_options, gain, seed, has_health, has_histograms):
    rng = np.random.default_rng(seed)
    with SummaryWriter(str(folder)) as writer:
        for index, step in enumerate(range(500, STEPS + 1, 500)):
            done, time = step / STEPS, 1e9 + 7.5 * index
            values = {
                "rollout/return": gain * done + 0.1 * rng.normal(),
                "rollout/success": done * 0.8,
                "time/env_steps_per_s": 66.0,
                "time/updates_per_s": 30.0,
                "q/mean": done,
                "staleness/collection": 3.0,
                "staleness/mean": 100.0 * done,
                "rate/learner_wait": 0.2,
                "rate/worker_wait": 0.1,
            }
            if num_options > 1:
                weights = np.arange(1, num_options + 1) + done
                values |= {f"option/share_{k}": share for k, share in enumerate(weights / weights.sum())}
                values |= {f"option/duration_{k}": 3.0 + k for k in range(num_options)}
                values |= {"option/usage_entropy": 0.9, "option/decision_rate": 0.2}
            if has_health:
                values |= {f"memory/{name}_gb": 0.5 for name in ("learner", "worker_0", "worker_1")}
                values |= {f"cpu/{name}": 0.9 for name in ("learner", "worker_0", "worker_1")}
            if index % 8 == 7:
                values |= {"val/return": gain * done, "val/success": done, "val/length": float(EPISODE)}
            for name, value in values.items():
                writer.add_scalar(name, value, step, walltime=time)
            if has_histograms and num_options > 1 and index % 10 == 0:
                for k in range(num_options):
                    writer.add_histogram(f"termination/option_{k}", rng.beta(1 + k, 5, 200), step, walltime=time)


def recording(env_steps=1000, num_options=4, episodes=2, length=EPISODE, pictures=8):
    """Arrays of one file of EpisodeVideo: each option runs for five steps, then the next one."""
    total = episodes * length
    step, episode = np.tile(np.arange(length), episodes), np.repeat(np.arange(episodes), length)
    option = (step // 5) % num_options
    action = np.zeros((total, 6), np.float32)
    action[np.arange(total), option % 6] = 0.8
    is_last = step == length - 1
    reward = np.full(total, 0.1, np.float32)
    shown = np.linspace(0, length - 1, pictures).round().astype(int)
    frames = np.zeros((episodes * pictures, 60, 80, 3), np.uint8)
    for index in range(len(frames)):
        frames[index] = 40
        frames[index, 20:40, index % 60 : index % 60 + 20] = (200, 160, 40)
    termination = np.where(step == 0, np.nan, 0.1 + 0.8 * (step % 5 == 0)).astype(np.float32)
    probs = np.full((total, num_options), 0.2 / max(1, num_options - 1), np.float32)
    probs[np.arange(total), option] = 0.8 if num_options > 1 else 1.0
    return {
        "obs": np.zeros((total, 3), np.float32), "action": action, "option": option,
        "switched": (step % 5 == 0) if num_options > 1 else step == 0, "reward": reward,
        "terminated": np.zeros(total, bool), "truncated": is_last,
        "success": np.where(is_last, 1.0, 0.0).astype(np.float32),
        "episode": episode, "step": step,
        "termination": termination if num_options > 1 else np.full(total, np.nan, np.float32),
        "option_probs": probs, "q": np.full((total, num_options), 0.9, np.float32), "gamma": np.float32(0.9),
        "num_options": num_options, "frames": frames, "frame_episode": np.repeat(np.arange(episodes), pictures),
        "frame_step": np.tile(shown, episodes), "env_steps": env_steps, "updates": 2 * env_steps,
        "greedy": False,
    }  # fmt: skip


def write_recording(file, env_steps, num_options):
    np.savez_compressed(file, **recording(env_steps, num_options))
