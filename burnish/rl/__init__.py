"""Every objective of the field as pure functions of tensors. Nothing here imports more than torch.

Two layouts, one set of functions: *padded* tensors are [B, T] and each row is a sequence; *packed*
tensors are [N] and come with ``sequence_ids`` [N] that say which sequence a token belongs to. A
mask is true where the policy acted; the values in other slots never matter. S is the number of
sequences.
"""
