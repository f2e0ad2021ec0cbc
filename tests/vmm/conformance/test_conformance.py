"""The specification of virtual memory, on every driver there is.

`HostDriver`; `CudaDriver` through the real bindings over the software CUDA driver, as it is and as a device
without read-only access; and, where there is one, the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.softcuda.library import environment
from vattn.vmm.conformance.rule import Outcome, Rule
from vattn.vmm.conformance.sandbox import DriverSpec
from vattn.vmm.conformance.specification import RULES
from vattn.vmm.conformance.suite import Suite, spec_of

SOFT = DriverSpec("cuda", {"tensor_device": "cpu"})
SUITES = {
    "host": lambda: Suite(spec_of("cpu")),
    "softcuda": lambda: Suite(SOFT, environment()),
    "softcuda without read-only access": lambda: Suite(
        SOFT, environment(granularity=64 << 10, memory=64 << 20, read_only=0)
    ),
}
NOT_SUPPORTED = {
    "host": {"recommended-granularity-is-a-multiple"},
    "softcuda": set(),
    "softcuda without read-only access": {
        "a-read-only-alias-can-be-read",
        "writing-a-read-only-alias-faults",
    },
}


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> Iterator[tuple[str, Suite]]:
    """(name, the suite on that driver)."""
    with SUITES[request.param]() as suite:
        yield request.param, suite


def assert_kept(driver: tuple[str, Suite], rule: Rule) -> None:
    name, suite = driver
    result = suite.run(rule)
    missing = rule.name in NOT_SUPPORTED[name]
    assert result.outcome is (Outcome.NOT_SUPPORTED if missing else Outcome.PASS), result


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("driver", ["host", "softcuda"], indirect=True)
def test_rule(driver: tuple[str, Suite], rule: Rule) -> None:
    assert_kept(driver, rule)


# The same software driver once more: what ends its process, and so costs a new one, is left out where it
# does not depend on the kind of access.
WITHOUT_READ_ONLY = "softcuda without read-only access"


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if not rule.faults or rule.name in NOT_SUPPORTED[WITHOUT_READ_ONLY]],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("driver", [WITHOUT_READ_ONLY], indirect=True)
def test_rule_without_read_only_access(driver: tuple[str, Suite], rule: Rule) -> None:
    assert_kept(driver, rule)


@pytest.mark.parametrize("driver", SUITES, indirect=True)
def test_the_driver_is_described(driver: tuple[str, Suite]) -> None:
    name, suite = driver
    assert suite.about["driver"] == ("host" if name == "host" else "cuda")
    assert 0 < suite.about["granularity"] < suite.about["free"] <= suite.about["total"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_breaks_no_rule() -> None:
    with Suite(spec_of("cuda")) as suite:
        results = list(suite.run_all())
    assert len(results) == len(RULES)
    assert [result for result in results if result.outcome is Outcome.FAIL] == []
