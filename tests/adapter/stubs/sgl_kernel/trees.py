"""Trees of drafted tokens: built, read back from a mask, verified greedily.

A node's children are a linked list: `child[p]` is the first, `sibling[c]` the next, -1 the end.
"""

from __future__ import annotations

import torch


def _link(child, sibling, parents):
    # From the last node to the first, so that a list runs in the order of its nodes.
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent is not None:
            sibling[node] = child[parent]
            child[parent] = node


def _parents(selected, parent_list, topk):
    # Node i > 0 is draft `selected[i - 1]`; drafts 0..topk-1 hang on the root. A draft whose
    # parent was not selected (its score tied) hangs nowhere.
    node_of = {draft: i + 1 for i, draft in reversed(list(enumerate(selected)))}
    found = [None]
    for draft in selected:
        group = draft // topk
        found.append(0 if group == 0 else node_of.get(parent_list[group]))
    return found


def build_tree_kernel_efficient_cpu(
    parent_list, selected, lengths, mask, positions, index, child, sibling, topk, depth, count, mode
):
    """Fill mask, positions and links of `count` nodes to each request.

    Mode 0 has a column to each committed token as well, mode 1 to the nodes alone.
    """
    flat, at = mask.view(-1), 0
    for b in range(selected.shape[0]):
        length = int(lengths[b])
        parents = _parents(selected[b].tolist(), parent_list[b].tolist(), topk)
        index.view(-1, count)[b] = torch.arange(b * count, (b + 1) * count)
        _link(child.view(-1, count)[b], sibling.view(-1, count)[b], parents)
        before = length if mode == 0 else 0
        size = count * (before + count)
        nodes = flat[at : at + size].view(count, before + count)[:, before:]
        at += size
        nodes.fill_(False)
        nodes[:, 0] = True
        for node in range(count):
            steps, up = 0, node
            while up and steps < depth:
                nodes[node, up] = True
                steps += 1
                up = parents[up] or 0
            # A draft that hangs nowhere is one step below a root that it does not follow.
            positions.view(-1, count)[b, node] = length + steps


def reconstruct_indices_from_tree_mask(
    mask, lengths, positions, index, child, sibling, requests, count
):
    """Fill positions and links from a mask of nodes alone; a node's last ancestor is its parent."""
    seen = mask.view(requests, count, count).bool()
    for b in range(requests):
        index.view(requests, count)[b] = torch.arange(b * count, (b + 1) * count)
        above = [seen[b, node, :node].nonzero().view(-1).tolist() for node in range(count)]
        for node, ancestors in enumerate(above):
            positions.view(requests, count)[b, node] = lengths[b] + len(ancestors)
        links = torch.full((2, count), -1, dtype=child.dtype)
        _link(links[0], links[1], [nodes[-1] if nodes else None for nodes in above])
        child.view(requests, count)[b] = links[0]
        sibling.view(requests, count)[b] = links[1]


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk from each root along the nodes that hold the token the target wants."""
    wanted = target_predict.reshape(-1).tolist()
    for b in range(candidates.shape[0]):
        tokens, place = candidates[b].tolist(), retrive_index[b].tolist()
        down, beside = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = down[path[-1]]
            while node >= 0 and tokens[node] != wanted[place[path[-1]]]:
                node = beside[node]
            if node < 0:
                break
            path.append(node)
        for depth, node in enumerate(path):
            accept_index[b, depth] = place[node]
            predicts[place[node]] = wanted[place[node]]
        accept_token_num[b] = len(path) - 1
