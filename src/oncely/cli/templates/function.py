"""Charges each order once, however often the function is called."""

import os

import oncely

ledger = oncely.open_ledger(os.environ["ONCELY_LEDGER"])  # set by: . ./oncely.env


@oncely.once(ledger, consumer="billing", key=lambda order_id, amount: order_id, keep_result=True)
def charge(order_id: str, amount: int) -> str:
    """What must not happen twice. A duplicate returns the stored receipt."""
    print(f"charging {order_id}: {amount}")
    return f"receipt for {order_id}"


if __name__ == "__main__":
    print("first call: ", charge("order-17", 99))
    print("second call:", charge("order-17", 99))
