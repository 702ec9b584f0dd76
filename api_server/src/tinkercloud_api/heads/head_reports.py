"""Records what heads report to the API servers that hold their leases."""

from dataclasses import dataclass

from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.catalog.usage.usage_ledger import UsageLedger
from tinkercloud_api.providers.base import HeadReport
from tinkercloud_protocol.heads.reports.kept_samples import SampleReport
from tinkercloud_protocol.heads.reports.thinned_curves import CurveReport


@dataclass(frozen=True, slots=True)
class HeadReports:
    """Records the reports of heads in the catalog."""

    usage: UsageLedger
    points: RunPoints
    samples: SampleTexts

    async def record(self, report: HeadReport) -> None:
        """Record a report. It may be repeated, and late.

        Raises:
            Unavailable: the catalog does not respond; the report was not recorded.
        """
        if isinstance(report, CurveReport):
            await self.points.record(report)
        elif isinstance(report, SampleReport):
            await self.samples.record(report)
        else:
            await self.usage.record(report)
