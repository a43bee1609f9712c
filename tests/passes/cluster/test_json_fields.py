"""The fields of JSON objects: what is read of them, and errors that name the place."""

from __future__ import annotations

import pytest

from passes.cluster.json_fields import Fields
from passes.errors import ClusterError


def test_errors_name_the_place_of_a_field() -> None:
    fields = Fields.of({"hosts": 2, "device": {"name": 3}}, "groups[0]", ("hosts", "device"), ("adapters",))
    assert fields.count("hosts") == 2
    device = fields.object("device", ("name",))
    with pytest.raises(ClusterError, match=r"groups\[0\]\.device\.name: should be text"):
        device.text("name")
    with pytest.raises(ClusterError, match=r"groups\[0\]: has no field 'hosts'"):
        Fields.of({}, "groups[0]", ("hosts",))
