"""Costs of products, beside what a table measured."""

from __future__ import annotations

from flashtile.hardware.linear_table import rows
from flashtile.io_model import Product, find_card


def test_no_measured_product_is_faster_than_its_floor():
    card = find_card("h200")
    for row in rows():
        for m, kinds in row.kernels.items():
            product = Product(int(m), row.N, row.K, row.dtype, row.weight_dtype)
            assert min(found["us"] for found in kinds.values()) * 1e-6 > product.floor_seconds(card)


def test_intensity_grows_with_the_rows_and_the_block():
    few, many = Product(1, 4096, 4096), Product(16, 4096, 4096)
    assert few.intensity(64) < 2 < few.intensity(64) * many.M
    assert many.intensity(16) < many.intensity(64) < 2 * many.M
