"""RL objectives as pure functions of tensors, which import nothing but torch.

All functions accept two layouts: *padded* tensors are [B, T], and each row is a sequence; *packed*
tensors are [N] and come with ``sequence_ids`` [N], which give the sequence of each token. A mask is
true for actions, the tokens that the policy sampled; values in other slots have no effect. S is the
number of sequences.
"""
