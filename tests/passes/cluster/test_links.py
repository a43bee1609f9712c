"""Links of hosts: of a data sheet's bandwidth, what collectives and single arrays get."""

from __future__ import annotations

import pytest

from passes.cluster import links


def test_a_link_in_a_host_is_given_as_measured() -> None:
    link = links.gpu_link(204, reduces=True)
    assert link.bytes_per_second == pytest.approx(204e9)
    assert (link.alpha_seconds, link.sent, link.reduces) == (links.ALPHA_SECONDS, links.SENT_INSIDE, True)


def test_a_network_gives_a_share_of_its_data_sheet_later_than_a_link_in_a_host() -> None:
    network, link = links.network(25), links.gpu_link(25)
    assert network.bytes_per_second == pytest.approx(links.NETWORK_SHARE * 25e9)
    assert network.alpha_seconds > link.alpha_seconds
    assert [made.low_latency for made in (network, link, links.plain(25, 0.0))] == [True, True, False]
