"""Reads a time line with readers that are not ours: Python's json, the `perfetto` package's own protobuf classes, and the `fxt`
package. Prints one JSON object, whatever the format. Fails if a slice has no end, unless `cut` says that the file has none, or ends
before it begins."""

import json
import sys

UNIT = 1000.0
MONOTONIC = 3


def chrome(path):
    with open(path) as file:
        events = json.load(file)
    names = {}
    for event in events:
        kind, track = event["ph"], event["tid"]
        arguments = event.get("args", {})
        if kind == "M" and event["name"] == "thread_name":
            names[track] = arguments["name"]
        elif kind == "M":
            yield ("process", None, None, arguments["name"], {})
        else:
            kinds = {"B": "begin", "E": "end", "i": "instant", "C": "value"}
            time = round(event["ts"] * UNIT)
            yield (kinds[kind], names.get(track, track), time, event.get("name"), arguments)


def perfetto(path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace()
    with open(path, "rb") as file:
        trace.ParseFromString(file.read())
    tracks, names, parents = {}, {}, set()
    first = trace.packet[0]
    assert first.clock_snapshot.primary_trace_clock == MONOTONIC
    clocks = {clock.clock_id: clock for clock in first.clock_snapshot.clocks}
    default = clocks[first.trace_packet_defaults.timestamp_clock_id]
    assert default.is_incremental and default.timestamp == clocks[MONOTONIC].timestamp
    latest = default.timestamp
    for packet in trace.packet:
        for name in packet.interned_data.event_names:
            names[name.iid] = name.name
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                yield ("process", None, None, track.process.process_name, {})
            elif not track.HasField("thread"):
                assert track.parent_uuid in tracks
            tracks[track.uuid] = track.name or track.thread.thread_name
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        time = packet.timestamp
        if packet.HasField("timestamp_clock_id"):
            assert packet.timestamp_clock_id == MONOTONIC
        else:
            latest += time
            time = latest
        arguments = {}
        for annotation in event.debug_annotations:
            value = annotation.WhichOneof("value")
            arguments[annotation.name] = getattr(annotation, value)
        kinds = {
            TrackEvent.TYPE_SLICE_BEGIN: "begin",
            TrackEvent.TYPE_SLICE_END: "end",
            TrackEvent.TYPE_INSTANT: "instant",
            TrackEvent.TYPE_COUNTER: "value",
        }
        kind, name = kinds[event.type], names.get(event.name_iid)
        if kind == "value":
            name, arguments = tracks[event.track_uuid], {"value": event.counter_value}
        yield (kind, tracks[event.track_uuid], time, name, arguments)


def fuchsia(path):
    from fxt.reader import parse_records

    with open(path, "rb") as file:
        result = parse_records(file)
    assert not result.had_unexpected_eof
    names = {}
    (provider,) = result.records_by_provider.values()
    for record in provider.records:
        what = type(record).__name__
        if what == "KernelObjectRecord":
            if record.name and not record.args:
                yield ("process", None, None, record.name, {})
            names[record.id] = record.name
            continue
        kinds = {
            "DurationBeginEventRecord": "begin",
            "DurationEndEventRecord": "end",
            "InstantEventRecord": "instant",
            "CounterEventRecord": "value",
        }
        track = record.thread.thread_id
        yield (kinds[what], names.get(track, track), record.timestamp_ns, record.name, record.args)


def main(path, is_cut):
    readers = {"json": chrome, "perfetto-trace": perfetto, "fxt": fuchsia}
    found = {"slices": [], "instants": [], "values": [], "process": None}
    open_slices = {}
    latest = {}
    for kind, track, time, name, arguments in readers[path.rsplit(".", 1)[1]](path):
        if kind == "process":
            found["process"] = name
            continue
        assert time >= latest.get(track, 0) or kind == "value", "a track goes back in time"
        latest[track] = time
        slices = open_slices.setdefault(track, [])
        if kind == "begin":
            one = {"track": track, "name": name, "begin": time, "depth": len(slices), "args": arguments}
            found["slices"].append(one)
            slices.append(one)
        elif kind == "end":
            one = slices.pop()
            one["end"] = time
            one["begin_args"], one["end_args"] = one["args"], arguments
            one["args"] = {**one["args"], **arguments}
        else:
            one = {"track": track, "name": name, "time": time, "args": arguments}
            found["instants" if kind == "instant" else "values"].append(one)
    assert is_cut or not any(open_slices.values()), "slices without an end"
    print(json.dumps(found))


main(sys.argv[1], sys.argv[2:] == ["cut"])
