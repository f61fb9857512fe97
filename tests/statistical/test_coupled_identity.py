"""Under the coupled rule the tokens are those of plain sampling, not merely distributed like them."""

from __future__ import annotations

import pytest

from edgespec.proof.rules import coupled_mismatches

pytestmark = pytest.mark.statistical


def test_coupled_is_plain_sampling_on_ten_thousand_pairs():
    """Random tables, vocabularies, parameters, draft shapes and lengths; that the count notices a wrong rule is tested
    with the proofs."""
    assert coupled_mismatches(10_000) == 0
