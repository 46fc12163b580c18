"""Settings and devices."""

from hiserve.config import flags, options
from hiserve.core import devices, memory_plan
from hiserve.text import frontend
from tests.unit import test_config
from tests.unit.core import test_devices, test_resolve
from tests.unit.text import test_frontend

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
    devices[replica * size : (replica + 1) * size]
    devices[:size]
with devices.environment_of, test_devices.test_groups_of_replicas_share_no_device:
    "groups of replicas share a device"
    devices[replica * size : (replica + 1) * size]
    devices[replica : replica + size]
with flags.Flag.add_to, test_config.test_what_is_for_debugging_works_and_is_not_shown:
    "--help shows what is for debugging"
    self.is_debug
    False
with memory_plan._Worker.check_parts, test_resolve.test_what_does_not_fit_names_what_to_change:
    "settings are resolved that do not fit in memory"
    left >= 0
    True
with frontend.Frontend.remember, test_frontend.test_a_reply_keeps_the_tokens_it_was_generated_with_but_for_the_end_token:
    "a remembered reply ends with its end token"
    self.tokenizer.without_hidden_end(ids)
    ids
