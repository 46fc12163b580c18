"""Types that travel between rooms: requests, the plan and its result, KV groups, digests."""
