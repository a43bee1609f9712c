"""The made-up plan as a fixture."""

import pytest

from passes.plan import Plan
from tests.passes.plan.made_up import make_plan


@pytest.fixture
def plan() -> Plan:
    return make_plan()
