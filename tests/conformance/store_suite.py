"""What a store has to do, as tests to inherit.

A test class defines two fixtures: `store`, the store, migrated and empty; and `clock`, the clock
that this store reads. What a store does not do by its nature its class declares by the flags of the
parts. What the rules answer is the same on every store, and is tested on two of them.
"""

from tests.conformance.audit_suite import AuditStatements
from tests.conformance.claim_suite import ClaimRules, ClaimStatements
from tests.conformance.horizon_suite import HorizonRules, HorizonStatements
from tests.conformance.races_suite import RecordRaces, TransactionRaces
from tests.conformance.reading_suite import ReadStatements
from tests.conformance.record_suite import RecordStatements
from tests.conformance.transaction_suite import TransactionRules, TransactionStatements
from tests.conformance.waiting_suite import WaitingStatements


class StatementsOfRecords(
    AuditStatements,
    ClaimStatements,
    HorizonStatements,
    ReadStatements,
    RecordRaces,
    RecordStatements,
):
    """What reaches statements of a store's own, where it has no transactions."""


class RacesOnAStore(RecordRaces, TransactionRaces):
    """What depends on locks and transactions alone."""


class StatementsOfAStore(
    StatementsOfRecords, TransactionRaces, TransactionStatements, WaitingStatements
):
    """What reaches statements of a store's own."""


class RulesOnAStore(ClaimRules, HorizonRules, TransactionRules):
    """What the rules answer, carried out by a ledger on a store with transactions."""
