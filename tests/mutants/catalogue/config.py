"""Settings and devices."""

from hiserve.config import flags, options
from hiserve.core import devices
from tests.unit import test_config
from tests.unit.core import test_devices

with flags._number, test_config.test_what_is_no_number_is_refused:
    "NaN is accepted as a number in range"
    number is None or isinstance(value, bool) or math.isnan(number)
    number is None or isinstance(value, bool)
with options.without_secrets, test_config.test_no_secret_is_left_in_what_may_be_shown:
    "INV 64: secrets are printed"
    msgspec.structs.replace(options, **sections)
    options
with devices.environment_of, test_devices:
    "all replicas run on the first device"
    replica
    0
