"""The proposer that a configuration asks for."""

from __future__ import annotations

from hiserve.config import Spec
from hiserve.core.drafts import Proposer
from hiserve.errors import ConfigError
from hiserve.kernels.draft_ops import draft_ops_for
from hiserve.runners.rows import DeviceRows
from hiserve.spec.ngram import NgramProposer


def open_proposer(settings: Spec, rows: DeviceRows) -> Proposer | None:
    """Returns what drafts, or None for plain decoding.

    Args:
        settings: Resolved.
        rows: The permanent rows.

    Raises:
        ConfigError: There is no such proposer.
    """
    match settings.spec:
        case "off":
            return None
        case "ngram":
            return NgramProposer(rows.state, draft_ops_for(rows.device))
        case other:
            raise ConfigError(f"--spec is {other!r}. Use off or ngram.", param="spec")
