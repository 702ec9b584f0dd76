"""Valid and invalid custom resources: cases for each rule."""

from tinkercloud_testing.resource_rules.base_models import BASE_MODEL_RULES
from tinkercloud_testing.resource_rules.extras import EXTRAS_RULES
from tinkercloud_testing.resource_rules.placement import PLACEMENT_RULES
from tinkercloud_testing.resource_rules.pools import POOL_RULES
from tinkercloud_testing.resource_rules.programs import PROGRAM_RULES
from tinkercloud_testing.resource_rules.rule import IMMUTABLE
from tinkercloud_testing.resource_rules.sessions import SESSION_RULES
from tinkercloud_testing.resource_rules.updates import UPDATE_RULES

RULES = (
    *BASE_MODEL_RULES,
    *EXTRAS_RULES,
    *PLACEMENT_RULES,
    *POOL_RULES,
    *PROGRAM_RULES,
    *SESSION_RULES,
    *UPDATE_RULES,
)
SINGLE_VALUED = {("TrainingSession", "spec.optimizer", IMMUTABLE)}
"""Rules of fields with a single valid value, which nothing can violate."""
