//! One block: attention and feed-forward, each behind a norm and beside a residual.
