"""EAGLE-3 in the matrix of methods, where the host runs the steps, at every depth, and on devices:
what every method owes (test_drafter_contracts.py), and every network (test_network_contracts.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import test_drafter_contracts as contracts
import test_network_contracts as networks
from method_cases import DEVICES, HOSTED, Folders, Where

DEPTHS = (0, 1, 2)
CONTRACTS = [
    contracts.test_texts_are_those_of_plain_decoding,
    contracts.test_requests_of_all_kinds_share_a_batch,
    contracts.test_requests_that_need_the_host_draft_as_others_do,
    contracts.test_steps_are_recorded_where_they_run,
    contracts.test_the_default_configuration_weighs_what_drafts_bring,
    contracts.test_a_second_turn_computes_what_is_new,
    contracts.test_streams_clients_and_cancels,
    networks.test_a_drafter_that_raises_costs_drafts_alone,
    networks.test_drafts_come_likeliest_first_with_their_estimates,
]


# Texts at every depth, the rest at one of them.
CASES = [
    pytest.param(contract, method, depth, id=f"{contract.__name__[5:]}-{method}-{depth}")
    for i, contract in enumerate(CONTRACTS)
    for j, method in enumerate(HOSTED)
    for depth in DEPTHS
    if i == 0 or (i + j) % len(DEPTHS) == depth
]


def owe(
    models: Folders, plain_texts: Any, contract: Any, method: str, where: Where, adaptive: bool
) -> None:
    known: dict[str, Any] = {
        "models": models, "plain_texts": plain_texts, "method": method, "where": where,
        "adaptive": adaptive,
    }  # fmt: skip
    contract(**{name: known[name] for name in inspect.signature(contract).parameters})


@pytest.mark.parametrize(("contract", "method", "depth"), CASES)
def test_what_every_method_owes(
    models: Folders, plain_texts: Any, contract: Any, method: str, depth: int
) -> None:
    owe(models, plain_texts, contract, method, Where("host", depth), bool(depth % 2))


ON_DEVICES = [
    contracts.test_texts_are_those_of_plain_decoding,
    contracts.test_every_rule_draws_what_the_host_draws,
    contracts.test_what_the_host_chooses_is_what_it_chooses_there,
    contracts.test_a_second_turn_computes_what_is_new,
    contracts.test_half_precision_on_a_device,
    networks.test_drafts_come_likeliest_first_with_their_estimates,
]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("method", HOSTED)
@pytest.mark.parametrize("contract", ON_DEVICES, ids=lambda contract: contract.__name__[5:])
def test_what_every_method_owes_on_a_device(
    models: Folders, plain_texts: Any, contract: Any, method: str, where: Where
) -> None:
    owe(models, plain_texts, contract, method, where, adaptive=False)
