// Grafana's types as they look in JSON: a TypeScript enum of strings is those strings there.
import type { AnnotationQuery, Dashboard, DataQuery, Panel, RowPanel } from '@grafana/schema';
import type { Options as StatOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type { Options as StateTimelineOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type { Options as TableOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type { Options as TimeSeriesOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

type Json<T> = T extends string
  ? `${T}`
  : T extends (infer Item)[]
    ? Json<Item>[]
    : T extends object
      ? { [Key in keyof T]: Json<T[Key]> }
      : T;

interface Options {
  stat: StatOptions;
  'state-timeline': StateTimelineOptions;
  table: Partial<TableOptions>;
  timeseries: Partial<TimeSeriesOptions>;
}

// Grafana's Prometheus query is no part of the package; these are the fields that it has.
interface Query extends DataQuery {
  expr: string;
  legendFormat: string;
  format?: 'table' | 'time_series' | 'heatmap';
  instant: boolean;
  range: boolean;
}

type OurPanel = {
  [Type in keyof Options]: Omit<Json<Panel>, 'type' | 'options' | 'targets'> & {
    type: Type;
    options: Json<Options[Type]>;
    targets: Json<Query>[];
  };
}[keyof Options];

export type OurDashboard = Omit<Json<Dashboard>, 'annotations' | 'panels'> & {
  annotations: { list: Json<AnnotationQuery<Pick<Query, 'refId' | 'expr'>>>[] };
  panels: (OurPanel | Json<RowPanel>)[];
};
