"""Megatron-core's model computes what Hugging Face's does: logits and gradients, in one process."""

from __future__ import annotations

import pytest
import torch
from model_cases import CASES, load, loss_of, loss_weights, parameters_of, reference

from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.policies.megatron import parallel
from slimectl.policies.megatron.batch import packed
from slimectl.policies.megatron.model import build
from slimectl.policies.options import MegatronOptions, TrainerOptions

ALONE = ParallelLayout()
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def groups():
    parallel.start(ALONE, seed=1)
    yield
    parallel.stop()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_those_of_hugging_face(name, tmp_path):
    hf = reference(name, tmp_path)
    (model,) = build(family_of(hf.config).architecture(hf.config), TrainerOptions(), MegatronOptions())
    load([model], hf, ALONE)
    row = packed([len(tokens) for tokens in hf.tokens], ALONE, rank=0, device=CPU)
    hidden_TH = model(hf.tokens_T, row)[:, 0]
    logits_TV = hidden_TH @ model.output_weight.T
    assert (logits_TV - hf.logits_TV).abs().max() < 1e-5

    loss_of(logits_TV, loss_weights(len(logits_TV))).backward()
    expected = hf.megatron(hf.gradients)
    for parameter_name, parameter in parameters_of([model]):
        if isinstance(parameter, torch.nn.Parameter):
            wanted = expected[parameter_name]
            gradient = parameter.grad if parameter.requires_grad else torch.zeros_like(parameter)
            assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, parameter_name
