//! What each fault does in each state, over each transport: the rows that the tests run and the page prints.

use Cell::Never;
use Fault::*;

use super::ends::*;
use super::fault::{CardFlaw, Cell, Fault, ListFlaw, Row, State};

/// `test: fault, state => shm, tcp; note` for each row. The test of a row that stands here exists.
macro_rules! table {
    ($($test:ident: $fault:expr, $state:ident => $shm:expr, $tcp:expr; $note:literal)*) => {
        pub(super) static ROWS: &[Row] = &[$(Row {
            test: stringify!($test),
            fault: $fault,
            state: State::$state,
            shm: $shm,
            tcp: $tcp,
            note: $note,
        }),*];
        mod row {
            $(#[test]
            fn $test() {
                super::super::run(stringify!($test));
            })*
        }
    };
}

/// The only way to end.
const fn one(end: &'static [&'static str; 1]) -> Cell {
    Cell::Ends(end)
}

table! {
    an_owner_killed_before_it_greets_is_unreachable:
        OwnerKilled, Handshake => one(&[CONNECT_UNREACHABLE]), one(&[CONNECT_UNREACHABLE]); ""
    an_owner_killed_while_the_path_opens_is_unreachable:
        OwnerKilled, Opening => one(&[CONNECT_UNREACHABLE]), one(&[CONNECT_UNREACHABLE]);
        "names what became of each transport"
    an_owner_killed_while_idle_is_unreachable_to_the_next_read:
        OwnerKilled, Idle => one(&[UNREACHABLE]), one(&[UNREACHABLE]); "of the next transfer, at once"
    an_owner_killed_fails_what_is_queued:
        OwnerKilled, Queued => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    an_owner_killed_fails_what_moves:
        OwnerKilled, Moving => one(&[UNREACHABLE]), one(&[UNREACHABLE]);
        "over shm a read may also end well before the loss is noticed: the mapping outlives the owner"
    an_owner_killed_fails_a_write:
        OwnerKilled, Writing => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    an_owner_killed_before_the_fence_fails_the_read:
        OwnerKilled, Fencing => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    a_read_is_good_though_its_notification_dies_with_the_owner:
        OwnerKilled, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification is lost: success is said of the data alone"
    what_has_completed_outlives_its_owner:
        OwnerKilled, Completed => one(&[GOOD]), one(&[GOOD]); ""
    an_owner_killed_fails_a_release:
        OwnerKilled, Releasing => one(&[CALL_UNREACHABLE]), one(&[CALL_UNREACHABLE]); ""

    an_owner_stopped_before_it_greets_runs_into_the_deadline:
        OwnerStopped, Handshake => one(&[CONNECT_DEADLINE]), one(&[CONNECT_DEADLINE]); ""
    an_owner_stopped_while_the_path_opens_runs_into_the_deadline:
        OwnerStopped, Opening => one(&[CONNECT_DEADLINE]), one(&[CONNECT_DEADLINE]); ""
    an_owner_stopped_while_idle_stalls_the_next_read_over_tcp:
        OwnerStopped, Idle => one(&[GOOD]), one(&[STALLED]); "of the next transfer"
    an_owner_stopped_stalls_what_is_queued_over_tcp:
        OwnerStopped, Queued => one(&[GOOD]), one(&[STALLED]); ""
    an_owner_stopped_stalls_what_moves_over_tcp:
        OwnerStopped, Moving => one(&[GOOD]), one(&[STALLED]); "a mapping needs nobody on the other side"
    an_owner_stopped_stalls_a_write_over_tcp:
        OwnerStopped, Writing => one(&[GOOD]), one(&[STALLED]); "the owner finds it whole when it goes on"
    an_owner_stopped_before_the_fence_stalls_over_tcp:
        OwnerStopped, Fencing => one(&[GOOD]), one(&[STALLED]); ""
    a_notification_waits_for_an_owner_that_is_stopped:
        OwnerStopped, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification arrives when the owner goes on"
    what_has_completed_stays_when_its_owner_stops:
        OwnerStopped, Completed => one(&[GOOD]), one(&[GOOD]); ""
    an_owner_stopped_stalls_a_release:
        OwnerStopped, Releasing => one(&[CALL_STALLED]), one(&[CALL_STALLED]); "after 5 s; the lease expires"

    a_cut_in_the_handshake_is_unreachable:
        Cut, Handshake => one(&[CONNECT_UNREACHABLE]), one(&[CONNECT_UNREACHABLE]); ""
    a_cut_while_the_path_opens_is_unreachable:
        Cut, Opening => one(&[CONNECT_UNREACHABLE]), one(&[CONNECT_UNREACHABLE]);
        "names what became of each transport"
    a_cut_while_idle_is_unreachable_to_the_next_read:
        Cut, Idle => one(&[UNREACHABLE]), one(&[UNREACHABLE]); "of the next transfer, at once"
    a_cut_fails_what_is_queued:
        Cut, Queued => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    a_cut_fails_what_moves:
        Cut, Moving => one(&[UNREACHABLE]), one(&[UNREACHABLE]);
        "a mapping has no connection to cut: the control session's end closes it"
    a_cut_fails_a_write:
        Cut, Writing => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    a_cut_before_the_fence_fails_the_read:
        Cut, Fencing => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    a_read_is_good_though_its_notification_is_cut_off:
        Cut, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification is lost"
    what_has_completed_stays_when_the_connection_is_cut:
        Cut, Completed => one(&[GOOD]), one(&[GOOD]); ""
    a_cut_fails_a_release:
        Cut, Releasing => one(&[CALL_UNREACHABLE]), one(&[CALL_UNREACHABLE]); ""

    silence_in_the_handshake_runs_into_the_deadline:
        Silent, Handshake => one(&[CONNECT_DEADLINE]), one(&[CONNECT_DEADLINE]); ""
    silence_while_the_path_opens_runs_into_the_deadline:
        Silent, Opening => one(&[CONNECT_DEADLINE]), one(&[CONNECT_DEADLINE]); ""
    silence_while_idle_stalls_the_next_read_over_tcp:
        Silent, Idle => one(&[GOOD]), one(&[STALLED]); "of the next transfer; keep-alive would tell after two minutes"
    silence_stalls_what_is_queued_over_tcp:
        Silent, Queued => one(&[GOOD]), one(&[STALLED]); ""
    silence_stalls_what_moves_over_tcp:
        Silent, Moving => one(&[GOOD]), one(&[STALLED]); "a mapping needs no connection"
    silence_stalls_a_write_over_tcp:
        Silent, Writing => one(&[GOOD]), one(&[STALLED]); "the owner finds it whole"
    silence_before_the_fence_stalls_over_tcp:
        Silent, Fencing => one(&[GOOD]), one(&[STALLED]); ""
    a_notification_waits_in_the_silence:
        Silent, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification arrives if the silence ends"
    what_has_completed_stays_in_the_silence:
        Silent, Completed => one(&[GOOD]), one(&[GOOD]); ""
    silence_stalls_a_release:
        Silent, Releasing => one(&[CALL_STALLED]), one(&[CALL_STALLED]); "after 5 s; the lease expires"

    an_owner_started_anew_before_it_greets_is_told_apart:
        Restarted, Handshake => one(&[CONNECT_RESTARTED]), one(&[CONNECT_RESTARTED]);
        "the reader names the boot epoch that it wants"
    an_owner_started_anew_while_the_path_opens_is_told_apart:
        Restarted, Opening => one(&[CONNECT_RESTARTED]), one(&[CONNECT_RESTARTED]);
        "the data connection shows the new incarnation"
    an_owner_started_anew_is_not_read_by_an_old_peer:
        Restarted, Idle => one(&[UNREACHABLE]), one(&[UNREACHABLE]); "of the next transfer, at once"
    an_owner_started_anew_fails_what_is_queued:
        Restarted, Queued => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    an_owner_started_anew_fails_what_moves:
        Restarted, Moving => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    an_owner_started_anew_fails_a_write:
        Restarted, Writing => one(&[UNREACHABLE]), one(&[UNREACHABLE]); ""
    an_owner_started_anew_before_the_fence_fails_the_read:
        Restarted, Fencing => one(&[UNREACHABLE]), one(&[UNREACHABLE]);
        "the new incarnation's fence is never asked for the old one's data"
    a_notification_never_reaches_another_incarnation:
        Restarted, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification is lost; the new incarnation hears nothing"
    what_has_completed_stays_when_the_owner_starts_anew:
        Restarted, Completed => one(&[GOOD]), one(&[GOOD]); ""
    an_owner_started_anew_fails_a_release:
        Restarted, Releasing => one(&[CALL_UNREACHABLE]), one(&[CALL_UNREACHABLE]); ""

    a_lease_over_before_the_handshake_is_refused:
        LeaseExpired, Handshake => one(&[FENCE_EXPIRED]), one(&[EXPIRED]); "of the first transfer"
    a_lease_over_while_the_path_opens_is_refused:
        LeaseExpired, Opening => one(&[FENCE_EXPIRED]), one(&[EXPIRED]); "of the first transfer"
    a_lease_over_while_idle_is_refused:
        LeaseExpired, Idle => one(&[FENCE_EXPIRED]), one(&[EXPIRED]); "of the next transfer"
    a_lease_over_fails_what_is_queued:
        LeaseExpired, Queued => one(&[FENCE_EXPIRED]), one(&[EXPIRED]); ""
    a_lease_over_fails_what_moves:
        LeaseExpired, Moving => one(&[FENCE_EXPIRED]), one(&[EXPIRED]);
        "nobody judges a read of a mapping: the fence, read last, does"
    a_lease_over_stops_a_write_over_tcp:
        LeaseExpired, Writing => one(&[GOOD]), one(&[EXPIRED]);
        "each slice is judged when it is asked for, and one that was admitted is written to its end; into a mapping nobody \
         judges a write: the owner gives no blocks to others that a peer may still write"
    a_lease_over_before_the_fence_is_read_fails_the_read:
        LeaseExpired, Fencing => one(&[FENCE_EXPIRED]), one(&[FENCE_EXPIRED]);
        "the data is right, and thrown away: nobody can tell"
    a_notification_outlives_the_lease:
        LeaseExpired, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification arrives; the fence is still to be read, and tells"
    what_has_completed_outlives_its_lease:
        LeaseExpired, Completed => one(&[GOOD]), one(&[GOOD]); ""
    a_lease_that_is_over_is_not_released:
        LeaseExpired, Releasing => one(&[CALL_REFUSED]), one(&[CALL_REFUSED]); "`lease-over`"

    a_region_dropped_before_the_handshake_is_unknown:
        Deregistered, Handshake => one(&[UNKNOWN_REGION]), one(&[UNKNOWN_REGION]); "of the first transfer"
    a_region_dropped_while_the_path_opens_is_unknown:
        Deregistered, Opening => one(&[UNKNOWN_REGION]), one(&[UNKNOWN_REGION]);
        "of the first transfer: the card names it, its file doesn't come"
    a_region_dropped_while_idle_is_unknown_over_tcp:
        Deregistered, Idle => Cell::Ends(&[GOOD, UNKNOWN_REGION]), one(&[UNKNOWN_REGION]);
        "of the next transfer; what is mapped can be read until the peer is told"
    a_region_dropped_fails_what_is_queued_over_tcp:
        Deregistered, Queued => Cell::Ends(&[GOOD, UNKNOWN_REGION]), one(&[UNKNOWN_REGION]);
        "what is mapped can be read until the peer is told"
    a_region_dropped_fails_what_moves_over_tcp:
        Deregistered, Moving => Cell::Ends(&[GOOD, UNKNOWN_REGION]), one(&[UNKNOWN_REGION]);
        "an owner that wants the bytes for something else changes the fence first"
    a_region_dropped_stops_a_write_over_tcp:
        Deregistered, Writing => Cell::Ends(&[GOOD, UNKNOWN_REGION]), one(&[UNKNOWN_REGION]);
        "a slice that was admitted is written to its end; what is mapped can be written until the peer is told"
    a_region_dropped_before_the_fence_is_read_does_no_harm:
        Deregistered, Fencing => one(&[GOOD]), one(&[GOOD]); "the fence's region is another one"
    a_notification_outlives_the_region:
        Deregistered, Notifying => one(&[GOOD]), one(&[GOOD]);
        "the notification arrives"
    what_has_completed_outlives_its_region:
        Deregistered, Completed => one(&[GOOD]), one(&[GOOD]); ""
    a_lease_on_a_region_that_is_gone_is_released:
        Deregistered, Releasing => one(&[GOOD]), one(&[GOOD]); ""

    a_reader_killed_before_it_proves_itself_is_forgotten:
        ReaderKilled, Handshake => one(&[NOT_GREETED]), one(&[NOT_GREETED]); ""
    a_reader_killed_while_the_path_opens_is_forgotten:
        ReaderKilled, Opening => one(&[GONE]), one(&[GONE]); ""
    a_reader_killed_while_idle_is_forgotten:
        ReaderKilled, Idle => one(&[GONE]), one(&[GONE]); ""
    a_reader_killed_with_reads_queued_is_forgotten:
        ReaderKilled, Queued => Never("slices wait in the reader: to the owner it is an idle one"), one(&[GONE]); ""
    a_reader_killed_in_a_read_is_forgotten:
        ReaderKilled, Moving => one(&[GONE]), one(&[GONE]); ""
    a_reader_killed_in_a_write_leaves_the_region_alone:
        ReaderKilled, Writing => one(&[GONE]), one(&[GONE]);
        "some of the write is in place: memory made to receive is the writer's until its session has ended"
    a_reader_killed_before_its_fence_is_forgotten:
        ReaderKilled, Fencing => Never("the fence is copied by the reader: to the owner it is an idle one"), one(&[GONE]); ""
    a_reader_killed_when_it_has_read_is_forgotten:
        ReaderKilled, Completed => one(&[GONE]), one(&[GONE]); "a lease that it held expires"
    a_reader_killed_while_it_releases_is_forgotten:
        ReaderKilled, Releasing => one(&[GONE]), one(&[GONE]); ""

    a_reader_stopped_before_it_proves_itself_is_given_up:
        ReaderStopped, Handshake => one(&[NOT_GREETED]), one(&[NOT_GREETED]); "after 2 s"
    a_reader_stopped_while_the_path_opens_keeps_its_control_session:
        ReaderStopped, Opening => one(&[NOT_GREETED]), one(&[NOT_GREETED]); "after 2 s, of the data connection"
    a_reader_stopped_while_idle_keeps_nothing_but_its_sessions:
        ReaderStopped, Idle => one(&[GOOD]), one(&[GOOD]); ""
    a_reader_stopped_with_reads_queued_finds_its_lease_over:
        ReaderStopped, Queued => Never("slices wait in the reader: to the owner it is an idle one"), one(&[GOOD]);
        "as in a read that moves"
    a_reader_stopped_in_a_read_finds_its_lease_over:
        ReaderStopped, Moving => one(&[GOOD]), one(&[GOOD]);
        "over TCP the owner sends what it had admitted when the reader goes on, as the blocks are then; over shm it reads on: \
         the fence tells"
    a_reader_stopped_in_a_write_keeps_what_it_writes:
        ReaderStopped, Writing => one(&[GOOD]), one(&[GOOD]);
        "it writes on when it goes on, over TCP what had been admitted: memory made to receive is the writer's until its \
         session has ended, over shm until its process has let go of the mapping"
    a_reader_stopped_before_its_fence_finds_its_lease_over:
        ReaderStopped, Fencing => Never("the fence is copied by the reader: to the owner it is an idle one"), one(&[GOOD]);
        "as in a read that moves"
    a_reader_stopped_when_it_has_read_keeps_nothing_but_its_sessions:
        ReaderStopped, Completed => one(&[GOOD]), one(&[GOOD]); "a lease that it held expires"
    a_reader_stopped_while_it_releases_has_released:
        ReaderStopped, Releasing => one(&[GOOD]), one(&[GOOD]); "the release had been sent"

    a_reader_silent_before_it_proves_itself_is_given_up:
        ReaderSilent, Handshake => one(&[NOT_GREETED]), one(&[NOT_GREETED]); "after 2 s"
    a_reader_silent_while_the_path_opens_keeps_its_control_session:
        ReaderSilent, Opening => one(&[NOT_GREETED]), one(&[NOT_GREETED]); "after 2 s, of the data connection"
    a_reader_silent_while_idle_is_asked_by_keep_alive:
        ReaderSilent, Idle => one(&[GOOD]), one(&[GOOD]); "keep-alive ends it"
    a_reader_silent_with_reads_queued_keeps_no_blocks:
        ReaderSilent, Queued => Never("slices wait in the reader: to the owner it is an idle one"), one(&[GOOD]);
        "`TCP_USER_TIMEOUT` ends it"
    a_reader_silent_in_a_read_keeps_no_blocks:
        ReaderSilent, Moving => one(&[GOOD]), one(&[GOOD]);
        "`TCP_USER_TIMEOUT` ends it; a mapping needs no connection, and is let go of when the reader notices, too"
    a_reader_silent_in_a_write_keeps_what_it_writes:
        ReaderSilent, Writing => one(&[GOOD]), one(&[GOOD]);
        "keep-alive ends it, and with it a slice that is half written; over shm it writes on until it notices, too"
    a_reader_silent_before_its_fence_keeps_no_blocks:
        ReaderSilent, Fencing => Never("the fence is copied by the reader: to the owner it is an idle one"), one(&[GOOD]);
        "`TCP_USER_TIMEOUT` ends it"
    a_reader_silent_when_it_has_read_keeps_no_blocks:
        ReaderSilent, Completed => one(&[GOOD]), one(&[GOOD]); "keep-alive ends it; a lease that it held expires"
    a_reader_silent_while_it_releases_keeps_no_blocks:
        ReaderSilent, Releasing => one(&[GOOD]), one(&[GOOD]); "the release is lost; the lease expires"

    memory_that_does_not_fit_is_not_registered:
        NoMemory, Registering => one(&[ALLOCATE]), one(&[ALLOCATE]); "names the call and `ENOMEM`"
    a_mapping_that_does_not_fit_is_passed_over:
        NoMemory, Opening => one(&[CONNECT_NO_TRANSPORT]), Never("tcp maps nothing of the peer's");
        "names the region; with `TransportChoice::Auto` tcp is taken instead"

    a_card_of_another_version_is_refused:
        Card(CardFlaw::Version), Handshake => one(&[CONNECT_CARD]), one(&[CONNECT_CARD]); "names both versions"
    a_card_cut_off_is_refused:
        Card(CardFlaw::Truncated), Handshake => one(&[CONNECT_AUTH]), one(&[CONNECT_AUTH]); ""
    a_card_that_is_too_long_is_refused:
        Card(CardFlaw::TooLong), Handshake => one(&[CONNECT_CARD]), one(&[CONNECT_CARD]); ""
    a_card_longer_than_a_frame_is_refused:
        Card(CardFlaw::LongerThanAFrame), Handshake => one(&[CONNECT_AUTH]), one(&[CONNECT_AUTH]);
        "before anything of it is read"
    a_card_tampered_with_is_refused:
        Card(CardFlaw::Tampered), Handshake => one(&[CONNECT_AUTH]), one(&[CONNECT_AUTH]); "the seal doesn't hold"
    a_card_of_another_incarnation_is_refused:
        Card(CardFlaw::OfAnother), Opening => Never("above: an owner started anew while the path opens"),
        one(&[CONNECT_RESTARTED]); ""

    blocks_outside_their_region_are_refused:
        Lists(ListFlaw::Outside), Posting => one(&[OUT_OF_RANGE]), one(&[OUT_OF_RANGE]);
        "before anything moves; a peer that asks all the same is refused by the owner (tcp) or by its own mapping (shm)"
    offsets_that_overflow_are_refused:
        Lists(ListFlaw::Overflowing), Posting =>
        Cell::Ends(&[OUT_OF_RANGE, INVALID]), Cell::Ends(&[OUT_OF_RANGE, INVALID]); "whichever rule is broken first"
    blocks_of_no_bytes_are_refused:
        Lists(ListFlaw::ZeroLength), Posting => one(&[INVALID]), one(&[INVALID]); ""
    no_blocks_are_read_at_once:
        Lists(ListFlaw::Empty), Posting => one(&[GOOD]), one(&[GOOD]); "nothing is touched"
    a_destination_named_twice_holds_one_of_its_sources:
        Lists(ListFlaw::Overlapping), Posting => one(&[GOOD]), one(&[GOOD]);
        "not looked for: each byte there is one of the sources', nothing else is touched, and the digest of the block that \
         lost tells"

    a_thousand_peers_leave_nothing:
        Churn, Throughout => one(&[GOOD]), one(&[GOOD]); "500 over each transport"
}
