"""The filter over options against worked figures, enumeration of all option sequences, and central differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_lightning.inference import FilterResult, forward_filter, smooth
from claw_lightning.losses import arrival_probs

NAN = math.nan


def table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flags(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def random_segment(
    seed: int, batch: int = 4, length: int = 4, num_options: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything but the prior; all steps valid and only the first one of each row opening an episode."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, length, num_options)
    option_logits, beta_logits, log_likelihood = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    first = torch.zeros(batch, length, dtype=torch.bool)
    first[:, 0] = True
    return option_logits.softmax(-1), beta_logits.sigmoid(), 2 * log_likelihood, first, torch.ones_like(first)


def enumerated(
    option_probs: Tensor,
    beta: Tensor,
    log_likelihood: Tensor,
    first: Tensor,
    valid: Tensor,
    prior: Tensor | None = None,
) -> tuple[FilterResult, Tensor]:
    """Filter and smoother from the joint probability of every option sequence, one row after the other."""
    batch, length, num_options = beta.shape
    prediction, posterior, smoothed = (torch.zeros_like(beta) for _ in range(3))
    log_evidence = torch.zeros(batch, dtype=beta.dtype)
    for b in range(batch):
        num_valid = int(valid[b].sum())
        for until in range(1, num_valid + 1):
            before, after = torch.zeros_like(beta[b]), torch.zeros_like(beta[b])
            for sequence in itertools.product(range(num_options), repeat=until):
                probability = torch.ones((), dtype=beta.dtype)
                for t, option in enumerate(sequence):
                    chosen = option_probs[b, t, option]
                    if t == 0 and prior is not None and not first[b, 0]:
                        chosen = prior[b, option]
                    elif t > 0 and not first[b, t]:
                        reselect = arrival_probs(option_probs[b, t][None], beta[b, t][None])[0]
                        chosen = reselect[sequence[t - 1], option]
                    probability = probability * chosen
                    if t == until - 1:
                        before[t, option] += probability
                    probability = probability * log_likelihood[b, t, option].exp()
                for t, option in enumerate(sequence):
                    after[t, option] += probability
            last = until - 1
            prediction[b, last] = before[last] / before[last].sum()
            posterior[b, last] = after[last] / after[last].sum()
            if until == num_valid:
                smoothed[b, :until] = (after / after.sum(-1, keepdim=True))[:until]
                log_evidence[b] = after[last].sum().log()
    return FilterResult(prediction, posterior, log_evidence), smoothed


class TestWorkedExample:
    """MDP-B with Gaussian options N(1, 1/4) and N(-1, 1/4); states 0, 1; actions 0.8, -0.2."""

    OPTION_PROBS = table([[[0.7, 0.3], [0.4, 0.6]]])
    BETA = table([[[0.3, 0.6], [0.1, 0.2]]])
    LOG_LIKELIHOOD = torch.distributions.Normal(table([1.0, -1.0]), 0.5).log_prob(table([[[0.8], [-0.2]]]))
    FIRST = flags([[1, 0]])
    ARGUMENTS = (OPTION_PROBS, BETA, LOG_LIKELIHOOD, FIRST, flags([[1, 1]]))

    def test_filter(self) -> None:
        likelihood = [[[0.7365402806, 0.0012238039], [0.0447890606, 0.2218416694]]]
        torch.testing.assert_close(self.LOG_LIKELIHOOD.exp(), table(likelihood), rtol=0, atol=1e-9)
        result = forward_filter(*self.ARGUMENTS)
        prediction = [[[0.7, 0.3], [0.9393880332, 0.0606119668]]]
        posterior = [[[0.9992884107, 0.0007115893], [0.7578147971, 0.2421852029]]]
        torch.testing.assert_close(result.prediction, table(prediction), rtol=0, atol=1e-9)
        torch.testing.assert_close(result.posterior, table(posterior), rtol=0, atol=1e-9)
        torch.testing.assert_close(result.log_likelihood, table([-3.5527561966]), rtol=0, atol=1e-9)

    def test_smoother(self) -> None:
        smoothed = smooth(*self.ARGUMENTS)
        torch.testing.assert_close(smoothed[0, 0, 0], table(0.9973382648), rtol=0, atol=1e-9)
        torch.testing.assert_close(smoothed[:, -1], forward_filter(*self.ARGUMENTS).posterior[:, -1])


class TestEnumeration:
    @staticmethod
    def check(*arguments: Tensor) -> None:
        expected, smoothed = enumerated(*arguments)
        for actual, wanted in zip(forward_filter(*arguments), expected):
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(smooth(*arguments), smoothed, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("seed", range(3))
    def test_random(self, seed: int) -> None:
        self.check(*random_segment(seed))

    def test_one_step_and_one_option(self) -> None:
        self.check(*random_segment(3, length=1))
        self.check(*random_segment(4, num_options=1))

    def test_lengths_and_episodes(self) -> None:
        option_probs, beta, log_likelihood, _, _ = random_segment(5)
        first = flags([[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 1, 1], [1, 0, 0, 1]])
        valid = flags([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
        self.check(option_probs, beta, log_likelihood, first, valid)

    def test_prior(self) -> None:
        """Used where the segment begins inside an episode, not where it opens one."""
        option_probs, beta, log_likelihood, _, valid = random_segment(6)
        first = flags([[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
        prior = table([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
        self.check(option_probs, beta, log_likelihood, first, valid, prior)

    def test_certainties(self) -> None:
        """Options that are never chosen, never or always end, or cannot have produced an action."""
        option_probs, beta, log_likelihood, first, valid = random_segment(7)
        option_probs[:, 0] = table([0.0, 0.4, 0.6])
        option_probs[:, 2] = table([0.0, 0.0, 1.0])
        beta[:, 1], beta[:, 2], beta[:, 3] = 0.0, 1.0, table([0.0, 1.0, 0.5])
        log_likelihood[:, 3, 1] = -math.inf
        self.check(option_probs, beta, log_likelihood, first, valid)

    def test_a_segment_may_be_cut(self) -> None:
        """The posterior of one half, carried over as the prior of the other, replaces the whole."""
        option_probs, beta, log_likelihood, first, valid = random_segment(8, length=6)
        whole = forward_filter(option_probs, beta, log_likelihood, first, valid)
        arguments = (option_probs, beta, log_likelihood, first, valid)
        early = forward_filter(*(argument[:, :3] for argument in arguments))
        carried = torch.einsum("bo,bop->bp", early.posterior[:, -1], arrival_probs(option_probs[:, 3], beta[:, 3]))
        late = forward_filter(*(argument[:, 3:] for argument in arguments), carried)
        torch.testing.assert_close(torch.cat([early.posterior, late.posterior], 1), whole.posterior)
        torch.testing.assert_close(early.log_likelihood + late.log_likelihood, whole.log_likelihood)


class TestGradients:
    @pytest.mark.parametrize("output", [0, 1, 2, 3])
    def test_against_differences(self, output: int) -> None:
        option_probs, beta, log_likelihood, _, _ = random_segment(9, batch=3)
        prior = table([[0.2, 0.3, 0.5]] * 3)
        first = flags([[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
        valid = flags([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])

        def function(option_probs: Tensor, beta: Tensor, log_likelihood: Tensor, prior: Tensor) -> Tensor:
            arguments = (option_probs, beta, log_likelihood, first, valid, prior)
            return smooth(*arguments) if output == 3 else forward_filter(*arguments)[output]

        inputs = [value.clone().requires_grad_() for value in (option_probs, beta, log_likelihood, prior)]
        assert torch.autograd.gradcheck(function, inputs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_finite_at_certainties(self, dtype: torch.dtype) -> None:
        option_probs, beta, log_likelihood, first, valid = random_segment(10, dtype=dtype)
        option_probs[:, 1] = torch.tensor([0.0, 0.0, 1.0], dtype=dtype)
        beta[:, 1], beta[:, 2], beta[:, 3] = 0.0, 1.0, torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
        log_likelihood[:, 2, 0] = -math.inf
        log_likelihood[0, 3] = -math.inf  # no option can have done this
        inputs = [value.clone().requires_grad_() for value in (option_probs, beta, log_likelihood)]
        result = forward_filter(*inputs, first, valid)
        assert result.log_likelihood.isinf().tolist() == [True, False, False, False]
        total = result.log_likelihood[1:].sum() + result.posterior.square().sum() + smooth(*inputs, first, valid).sum()
        total.backward()
        for value in inputs:
            assert value.grad is not None
            assert value.grad.isfinite().all()

    def test_learns_who_acted(self) -> None:
        """Raising the likelihood by gradient moves the density of the option that explains the action."""
        option_probs, beta, log_likelihood, first, valid = random_segment(11)
        leaf = log_likelihood.clone().requires_grad_()
        forward_filter(option_probs, beta, leaf, first, valid).log_likelihood.sum().backward()
        assert leaf.grad is not None
        # Fisher's identity: the gradient is the smoothed posterior.
        torch.testing.assert_close(leaf.grad, smooth(option_probs, beta, log_likelihood, first, valid))


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_far_densities(self, dtype: torch.dtype) -> None:
        """Many joints: densities beyond any floating range, where only their ratios matter."""
        option_probs, beta, log_likelihood, first, valid = random_segment(12, dtype=dtype)
        plain = forward_filter(option_probs, beta, log_likelihood, first, valid)
        for shift in (-2000.0, 500.0):
            moved = forward_filter(option_probs, beta, log_likelihood + shift, first, valid)
            torch.testing.assert_close(moved.posterior, plain.posterior, rtol=2e-3, atol=2e-4)
            torch.testing.assert_close(moved.log_likelihood, plain.log_likelihood + 4 * shift)

    def test_unlikely_is_not_impossible(self) -> None:
        """An option that lost by 300 nats and cannot end must win again when the next action says so by 600."""
        option_probs, beta = torch.full((1, 2, 2), 0.5), torch.zeros(1, 2, 2)
        log_likelihood = torch.tensor([[[0.0, -300.0], [-600.0, 0.0]]])
        first, valid = flags([[1, 0]]), flags([[1, 1]])
        result = forward_filter(option_probs, beta, log_likelihood, first, valid)
        assert result.posterior[0].tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert result.log_likelihood.item() == pytest.approx(-300 - math.log(2))
        assert smooth(option_probs, beta, log_likelihood, first, valid)[0].tolist() == [[0.0, 1.0], [0.0, 1.0]]

    def test_long_segment_stays_normalised(self) -> None:
        option_probs, beta, log_likelihood, first, valid = random_segment(13, length=500, dtype=torch.float32)
        beta[:, ::3] = 0.0
        option_probs[:, 100:300, 0] = 0.0
        option_probs = option_probs / option_probs.sum(-1, keepdim=True)
        arguments = (option_probs, beta, 50 * log_likelihood, first, valid)
        for probs in (*forward_filter(*arguments)[:2], smooth(*arguments)):
            torch.testing.assert_close(probs.sum(-1), torch.ones(4, 500), rtol=0, atol=2e-3)

    @pytest.mark.parametrize("filling", [NAN, math.inf, -1e30])
    def test_invalid_steps_do_not_leak(self, filling: float) -> None:
        *values, first, _ = random_segment(14)
        valid = flags([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
        first = first | ~valid
        clean = forward_filter(*values, first, valid)
        leaves = [value.masked_fill(~valid[..., None], filling).requires_grad_() for value in values]
        result = forward_filter(*leaves, first, valid)
        for actual, expected in zip(result, clean):
            assert torch.equal(actual, expected)
        smoothed = smooth(*leaves, first, valid)
        assert torch.equal(smoothed, smooth(*values, first, valid))
        for probs in (result.prediction, result.posterior, smoothed):
            assert (probs[~valid] == 0).all()
        (result.log_likelihood.sum() + result.posterior.square().sum() + smoothed.square().sum()).backward()
        for leaf in leaves:
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()
            assert (leaf.grad[~valid] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_is_cast(self, dtype: torch.dtype) -> None:
        arguments = random_segment(15, dtype=dtype)
        assert {value.dtype for value in (*forward_filter(*arguments), smooth(*arguments))} == {dtype}

    @pytest.mark.parametrize("function", [forward_filter, smooth])
    def test_refusals(self, function: Callable[..., Any]) -> None:
        option_probs, beta, log_likelihood, first, valid = random_segment(16)
        with pytest.raises(ValueError, match="shapes differ"):
            function(option_probs, beta[..., :1], log_likelihood, first, valid)
        with pytest.raises(ValueError, match="shapes differ"):
            function(option_probs, beta, log_likelihood, first[:, :1], valid)
        with pytest.raises(ValueError, match="shapes differ"):
            function(option_probs, beta, log_likelihood, first, valid, beta[0, :1])
        with pytest.raises(ValueError, match="L > 0"):
            function(option_probs[0], beta[0], log_likelihood[0], first[0], valid[0])
        with pytest.raises(TypeError, match="first must be boolean"):
            function(option_probs, beta, log_likelihood, first.double(), valid)
        with pytest.raises(TypeError, match="valid must be boolean"):
            function(option_probs, beta, log_likelihood, first, valid.long())
