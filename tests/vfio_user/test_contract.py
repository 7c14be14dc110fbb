"""A model that breaks its contract is refused when it is loaded."""

from __future__ import annotations

import pytest

from accelvisor.errors import CallerError
from accelvisor.vfio_user.model import IrqInfo, RegionInfo
from accelvisor.vfio_user.session import ServerSession

from .sample import SampleDevice

# --- contract -----------------------------------------------------------------------------------


def broken_model(**changes: object) -> SampleDevice:
    model = SampleDevice()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reset": None}, "lacks reset"),
        ({"region_info": lambda i: RegionInfo(0, 0, 0)}, "says that it is 0"),
        ({"region_info": lambda i: RegionInfo(i, 0, 1 << 63)}, "bytes"),
        ({"region_info": lambda i: RegionInfo(i, 7, 4096)}, "not both"),
        ({"region_info": lambda i: RegionInfo(i, 3, 4096, 0)}, "not both"),
        ({"region_info": lambda i: RegionInfo(i, 7, 100, 0)}, "is mappable and has 100"),
        ({"region_info": lambda i: RegionInfo(i, 11, 4096)}, "CAPS"),
        ({"region_info": lambda i: RegionInfo(i, 3, 4096, None, ((0, 4096),))}, "cannot be mapped"),
        ({"region_info": lambda i: RegionInfo(i, 7, 4096, 0, ((0, 8192),))}, "past its end"),
        ({"region_info": lambda i: RegionInfo(i, 7, 8192, 0, ((1, 4096),))}, "sparse area of"),
        ({"irq_info": lambda i: IrqInfo(0, 0, 0)}, "interrupt 1"),
    ],
)
def test_model_that_breaks_its_contract_fails_at_load(
    changes: dict[str, object], reason: str
) -> None:
    # spdk/spdk #1883: a missing callback crashed the target when a guest needed it.
    model = broken_model(**changes)
    with pytest.raises(CallerError, match=reason) as error:
        ServerSession(model)
    assert error.value.code == "device-model"
    model.close()
