"""The caller's policy: what is accepted. The public names of this package are those of `policy`."""

from client_sdk.policy.policy import FAMILY_INSECURE as FAMILY_INSECURE
from client_sdk.policy.policy import REQUIRABLE_CLAIMS as REQUIRABLE_CLAIMS
from client_sdk.policy.policy import Policy as Policy
from client_sdk.policy.policy import UnsafeAcceptInsecure as UnsafeAcceptInsecure
from client_sdk.policy.policy import parse_families as parse_families
from client_sdk.policy.policy import policy_from_reference as policy_from_reference
