"""Loads and saves alone, with no model beside them."""
