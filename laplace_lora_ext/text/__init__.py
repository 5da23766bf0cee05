"""Predicts free text: scores under drawn weights, choices of the prior by them,
generation.
"""
