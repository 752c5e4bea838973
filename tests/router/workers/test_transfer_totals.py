"""Transfers never fall: not when a worker dies, not when the router starts again."""

from router.routing.workers.transfer_totals import TransferLedger

ONE, TWO = b"1" * 16, b"2" * 16


def test_sums_run_over_all_lives_and_never_fall(tmp_path):
    ledger = TransferLedger()
    ledger.note(ONE, (2, 200, 1))
    ledger.note(TWO, (1, 50, 0))
    ledger.note(ONE, (1, 100, 0))  # a report that was late
    assert ledger.total() == (3, 250, 1)


def test_a_router_that_starts_again_knows_the_dead(tmp_path):
    file = tmp_path / "transfers.json"
    before = TransferLedger(file)
    before.note(ONE, (2, 200, 1))
    before.save()
    after = TransferLedger(file)
    after.note(TWO, (1, 50, 0))
    assert after.total() == (3, 250, 1)


def test_a_damaged_file_and_a_missing_folder_harm_nobody(tmp_path):
    file = tmp_path / "transfers.json"
    file.write_bytes(b"{ not json")
    assert TransferLedger(file).total() == (0, 0, 0)
    lost = TransferLedger(tmp_path / "gone" / "transfers.json")
    lost.note(ONE, (1, 1, 0))
    assert lost.total() == (1, 1, 0)


def test_old_lives_count_on(tmp_path):
    ledger = TransferLedger()
    for number in range(5000):
        ledger.note(number.to_bytes(16, "big"), (1, 10, 0))
    assert ledger.total() == (5000, 50_000, 0)
