"""Settings that contradict each other are refused in one line that names both."""

import math

import numpy as np
import pytest

import callbacks
from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.module import OptionCritic
from claw_lightning.replay.samplers import Prioritized
from claw_lightning.settings import Distillation, Diversity, PolicyGradient
from tests.runs import fit_fake, make_batch, make_module

GAUSS = {"actor": "gaussian", "exploration": Exploration(kind="none")}


@pytest.mark.parametrize(
    "settings, first, second",
    [
        ({"min_option_duration": 5, "max_option_duration": 3}, "min_option_duration (5)", "max_option_duration (3)"),
        ({"num_options": 1, "distillation": Distillation("student")}, "distillation.kind student", "num_options 1"),
        ({"option_selection": 4}, "option_selection 4", "num_options 4"),
        ({"option_selection": -1}, "option_selection -1", "num_options 4"),
        ({"option_inference": "filter"}, "option_inference filter", "actor deterministic"),
        ({"n_step": 3, "all_options": 0.5}, "n_step 3", "all_options 0.5"),
        ({**GAUSS, "n_step": 3, "option_inference": "filter"}, "n_step 3", "option_inference filter"),
        ({**GAUSS, "option_inference": "filter", "all_options": 0.5}, "option_inference filter", "all_options 0.5"),
        ({"n_step": 3, "critic_atoms": 51}, "n_step 3", "critic_atoms 51"),
        ({"critic_atoms": 51, "actor": "categorical"}, "critic_atoms 51", "actor categorical"),
        ({"policy_gradient": PolicyGradient()}, "policy_gradient", "actor deterministic"),
        ({**GAUSS, "policy_gradient": PolicyGradient(), "n_step": 3}, "policy_gradient", "n_step 3"),
        ({**GAUSS, "policy_gradient": PolicyGradient(), "option_inference": "filter"},
         "policy_gradient", "option_inference filter"),
        ({**GAUSS, "policy_gradient": PolicyGradient(), "critic_atoms": 51}, "policy_gradient", "critic_atoms 51"),
        ({**GAUSS, "policy_gradient": PolicyGradient(), "num_options": 1}, "policy_gradient", "num_options 1"),
        ({**GAUSS, "policy_gradient": PolicyGradient(options="all"), "all_options": 0.5},
         "policy_gradient.options all", "all_options 0.5"),
        ({"actor": "gaussian", "exploration": Exploration(), "policy_gradient": PolicyGradient()},
         "policy_gradient", "exploration.kind gaussian"),
        ({"actor": "gaussian", "exploration": Exploration(kind="ornstein_uhlenbeck"), "option_inference": "filter"},
         "option_inference filter", "exploration.kind ornstein_uhlenbeck"),
        ({"actor": "gaussian", "exploration": Exploration(), "n_step": 3, "n_step_form": "retrace"},
         "n_step_form retrace", "exploration.kind gaussian"),
        ({"actor": "gaussian", "exploration": Exploration("none", uniform=0.1, uniform_steps=4),
          "policy_gradient": PolicyGradient()}, "policy_gradient", "exploration.uniform_steps 4"),
        ({"actor": "gaussian", "exploration": Exploration("none", uniform=0.1, uniform_components=0.5),
          "option_inference": "filter"}, "actor gaussian", "exploration.uniform_components 0.5"),
        ({"actor": "gaussian", "exploration": Exploration("none", uniform=0.1, uniform_scale=1.5),
          "policy_gradient": PolicyGradient()}, "policy_gradient", "exploration.uniform_scale 1.5"),
    ],
)  # fmt: skip
def test_contradictions_name_both_settings(settings, first, second):
    with pytest.raises(ConfigError) as error:
        OptionCritic(**settings)
    text = str(error.value)
    assert f"model.{first}" in text and f"model.{second}" in text and "\n" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"num_options": 1, "all_options": 0.5},
        {"num_options": 1, "diversity": Diversity(bonus=1.0, adaptive_weights=True), "interruption": 0.1},
        {"num_options": 1, "target_decision_rate": 0.2, "option_heads": "separate"},
        {**GAUSS, "n_step": 3, "n_step_form": "retrace"},
        {"actor": "gaussian", "exploration": Exploration(), "n_step": 3, "n_step_form": "switch"},
        {"actor": "categorical", "option_inference": "filter"},
        {"option_selection": 3},
    ],
)
def test_what_fits_together_passes(settings):
    OptionCritic(**settings)


def test_no_noise_is_the_default_where_densities_of_stored_actions_are_used():
    assert OptionCritic(actor="gaussian", option_inference="filter").exploration.kind == "none"
    assert OptionCritic(actor="gaussian", policy_gradient=PolicyGradient()).exploration.kind == "none"
    assert OptionCritic(actor="gaussian").exploration.kind == "gaussian"


@pytest.mark.parametrize(
    "group, settings, first, second",
    [
        (Distillation, {"kl_limit": 0.1, "final_coefficient": 0.0, "decay_steps": 5}, "kl_limit", "final_coefficient"),
        (Distillation, {"final_coefficient": 0.0}, "final_coefficient", "decay_steps"),
        (Distillation, {"decay_steps": 10}, "final_coefficient", "decay_steps"),
        (Distillation, {"kind": "teacher"}, "kind", "teacher"),
        (Distillation, {"kind": "target", "teacher": "a.ckpt"}, "kind", "teacher"),
        (PolicyGradient, {"length": 1, "advantage": "gae"}, "length", "advantage"),
    ],
)
def test_contradictions_inside_a_group_name_both(group, settings, first, second):
    with pytest.raises(ConfigError) as error:
        group(**settings)
    name = {Distillation: "model.distillation", PolicyGradient: "model.policy_gradient"}[group]
    text = str(error.value)
    assert f"{name}.{first}" in text and f"{name}.{second}" in text and "\n" not in text


@pytest.mark.parametrize(
    "group, settings, key",
    [
        (Distillation, {"coefficient": -1.0}, "model.distillation.coefficient"),
        (Distillation, {"tau": 0.0}, "model.distillation.tau"),
        (Distillation, {"kl_limit": 0.0}, "model.distillation.kl_limit"),
        (Distillation, {"student_hidden_sizes": []}, "model.distillation.student_hidden_sizes"),
        (PolicyGradient, {"length": 0}, "model.policy_gradient.length"),
        (PolicyGradient, {"trace": 1.5}, "model.policy_gradient.trace"),
        (PolicyGradient, {"surrogate_clip": 0.0}, "model.policy_gradient.surrogate_clip"),
        (Diversity, {"bonus": -1.0}, "model.diversity.bonus"),
        (Diversity, {"length_scale": 0.0}, "model.diversity.length_scale"),
        (Diversity, {"max_weight": 0.5}, "model.diversity.max_weight"),
    ],
)
def test_wrong_values_of_groups_are_named(group, settings, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        group(**settings)


@pytest.mark.parametrize(
    "settings, key",
    [
        ({"num_critics": 0}, "model.num_critics"),
        ({"n_step": 0}, "model.n_step"),
        ({"filter_length": 0}, "model.filter_length"),
        ({"all_options": 1.5}, "model.all_options"),
        ({"trace": -0.5}, "model.trace"),
        ({"target_decision_rate": 1.0}, "model.target_decision_rate"),
        ({"critic_atoms": 1}, "model.critic_atoms"),
        ({"value_range": (1.0, 1.0)}, "model.value_range"),
        ({"option_selection": "best"}, "model.option_selection"),
        ({"interruption": -0.1}, "model.interruption"),
        ({"deliberation_cost_lr": 0.0}, "model.deliberation_cost_lr"),
    ],
)
def test_wrong_new_settings_are_named(settings, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        OptionCritic(**settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"kind": "none", "kl_limit": 0.1}, ["kl_limit", "kind 'none'"]),
        ({"kind": "student", "final_coefficient": 0.1, "decay_steps": 10}, ["final_coefficient", "kind 'student'"]),
        ({"kind": "target", "final_coefficient": 0.1, "decay_steps": -5}, ["decay_steps (-5)"]),
    ],
)
def test_a_coefficient_without_a_reference_is_refused(settings, names):
    with pytest.raises(ConfigError) as error:
        Distillation(**settings)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"value_range": (-math.inf, 5.0)}, "model.value_range"),
        ({"n_step_form": "retrace"}, "model.n_step 1"),
        ({"actor": "gaussian", "policy_gradient": PolicyGradient(), "diversity": Diversity(bonus=1.0),
          "exploration": Exploration(kind="none")}, "model.diversity.bonus"),
        ({"actor": "gaussian", "policy_gradient": PolicyGradient(), "all_options": 0.5,
          "exploration": Exploration(kind="none")}, "model.all_options 0.5"),
    ],
)  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        OptionCritic(num_options=2, **settings)


@pytest.mark.parametrize("settings", [{"n_step": 3}, {"option_inference": "filter", "actor": "gaussian"}])
def test_one_option_is_one_setting_away_from_a_file_with_all_options(settings):
    OptionCritic(num_options=1, all_options=0.5, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"critic_input": "stat"}, {"critic_input": None}, {"target_delay": 1.5}, {"target_delay": "2"}, {"tau": True},
     {"tau": "0.1"}, {"num_options": 2.5}, {"num_options": "4"}, {"layer_norm": "no"}, {"hidden_sizes": 64},
     {"hidden_sizes": "64"}, {"hidden_sizes": [64.0]}, {"value_range": (0.0, 1.0, 2.0)}, {"gamma": [0.9]},
     {"exploration": "none"}, {"distillation": {"kind": "target"}}, {"critic_lr": "fast"}, {"arrival": "expcted"},
     {"policy_gradient": True}, {"greedy_options": 1}],
)  # fmt: skip
def test_values_of_other_types_are_named(settings):
    """From Python no parser has looked at them; ignored, or taken for others, they train something else."""
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"^model\.{name} is .*; give "):
        OptionCritic(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 0}, {"gamma": np.float32(0.9)}, {"num_options": np.int64(2)}, {"hidden_sizes": (8, 8)},
     {"value_range": [-1, 1]}, {"option_selection": 1}, {"tau": 1}, {"target_delay": None}],
)  # fmt: skip
def test_numbers_and_sequences_of_other_kinds_pass(settings):
    OptionCritic(**settings)


@pytest.mark.parametrize(
    "group, settings, key",
    [
        (Exploration, {"kind": "gauss"}, "exploration.kind"),
        (Exploration, {"decay_steps": 1.5}, "exploration.decay_steps"),
        (Distillation, {"kind": "targt"}, "distillation.kind"),
        (Distillation, {"tau": "0.1"}, "distillation.tau"),
        (PolicyGradient, {"length": math.nan}, "policy_gradient.length"),
        (Diversity, {"adaptive_weights": "no"}, "diversity.adaptive_weights"),
    ],
)
def test_values_of_other_types_in_groups_are_named(group, settings, key):
    with pytest.raises(ConfigError, match=rf"^model\.{key} is .*; give "):
        group(**settings)


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: callbacks.PolicyPublisher(every=math.nan), "PolicyPublisher.every"),
        (lambda: callbacks.StalenessMonitor(limit="9"), "StalenessMonitor.limit"),
        (lambda: callbacks.EpisodeLog(max_episodes=1.5), "EpisodeLog.max_episodes"),
        (lambda: callbacks.TrainingProgress(line_seconds="1"), "TrainingProgress.line_seconds"),
        (lambda: callbacks.RolloutWriter(video_episodes=math.nan), "RolloutWriter.video_episodes"),
        (lambda: callbacks.NoveltyBonus(hidden=1.5), "NoveltyBonus.hidden"),
        (lambda: callbacks.Curriculum("size", 1.0), "Curriculum.stages"),
        (lambda: callbacks.RunCheckpoint(at_minutes=[True]), "RunCheckpoint.at_minutes"),
        (lambda: callbacks.WorkerHealth(growth_limit_gb="1"), "WorkerHealth.growth_limit_gb"),
        (lambda: Prioritized(alpha=0.5, anneal_steps="9"), "data.sampler.init_args.anneal_steps"),
        (lambda: ReplayDataModule(EnvConfig("FourRoomsEnv"), capacity=math.nan), "data.capacity"),
        (lambda: ReplayDataModule(EnvConfig("FourRoomsEnv"), warmup_steps="9"), "data.warmup_steps"),
        (lambda: ReplayDataModule(EnvConfig("FourRoomsEnv"), seed=1.5), "data.seed"),
        (lambda: ReplayDataModule(EnvConfig("FourRoomsEnv"), mode="lockstp"), "data.mode"),
        (lambda: ReplayDataModule(EnvConfig("FourRoomsEnv"), sampler="Uniform"), "data.sampler"),
    ],
)
def test_values_of_other_types_elsewhere_are_named(make, key):
    with pytest.raises(ConfigError, match=rf"^{key} is "):
        make()


def test_what_a_loaded_module_is_given_wins_or_is_refused(tmp_path):
    module = make_module(exploration=Exploration(scale_max=0.3))
    trainer, _ = fit_fake(module, [make_batch()])
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    load = OptionCritic.load_from_checkpoint
    assert load(path).exploration.scale_max == 0.3 and load(path, critic_input="auto").settings.critic_input == "obs"
    assert load(path, exploration=Exploration(scale_max=0.7)).exploration.scale_max == 0.7
    assert load(path, deliberation_cost=0.25).policy.switch_cost.item() == 0.25
    for wrong, key in (
        ({"critic_input": "states"}, "critic_input states"),
        ({"distillation": Distillation("target")}, "distillation.kind target"),
        ({"initial_termination": 0.3}, "initial_termination 0.3"),
    ):
        with pytest.raises(ConfigError, match=f"^model.{key} "):
            load(path, **wrong)
