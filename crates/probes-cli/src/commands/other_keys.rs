//! The warning that keys found no room.

use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::number_of;

/// Warns if hits are `other`, because there was no room for their keys: the lines of keys may lack hits, too.
pub(super) fn warn_of_other_keys(messages: &Messages, other: u64) {
    if other > 0 {
        messages.warning(
            WarningKind::OtherKeys,
            &format!(
                "the keys of {} found no room: these are `other`, and the lines of keys may lack hits",
                number_of(other, "hit")
            ),
            "fewer keys have room: -where chooses hits, and an expression such as `arg0 >> 4` or `arg0 & 0xff` has fewer values",
        );
    }
}
